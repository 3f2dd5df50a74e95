"""Private names of torch and triton: each is there as the module says, and no other place asks for one."""

import ast
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from shim import _torch_names
from shim._torch_names import ATTRIBUTES, NAMES, MissingNameError, find, missing, outside_graph, required
from shim.ops import PagedStash

TREE = Path(__file__).parents[2]
PACKAGES = ("torch", "triton")


def expected(package, name):
    """Whether this release of the package is to have the name; None without the package."""
    try:
        here = Version(version(package))
    except PackageNotFoundError:
        return None
    later = bool(name.until) and here.release[:2] > Version(name.until).release[:2]
    return not later and (not name.since or here >= Version(name.since))


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_there_since_and_until_when_the_module_says(path):
    wanted = expected(path.partition(":")[0].partition(".")[0], NAMES[path])
    if wanted is None:
        pytest.skip("triton is not installed")
    assert (find(path) is not None) == wanted, f"{path}: {NAMES[path]}"
    assert bool(missing([path])) != wanted


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_attributes_of_objects_are_there_too():
    tensor = torch.ones(3, requires_grad=True)
    node = tensor.exp().grad_fn
    objects = {
        "a tensor": tensor,
        "a storage": tensor.untyped_storage(),
        "a node": node,
        "a node of a custom function": Twice.apply(tensor).grad_fn,
        "a saved tensor": node._raw_saved_result,
    }
    found = {(owner, name): hasattr(type(objects[owner]), name) for owner, name in ATTRIBUTES}
    assert found == {key: expected("torch", name) for key, name in ATTRIBUTES.items()}


def test_each_says_what_happens_without():
    assert all(name.without for name in (*NAMES.values(), *ATTRIBUTES.values()))


# ---- no other place


def roots(tree):
    """The names that stand for modules of torch or triton in a file, each with its dotted path."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    found[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: path or name for name, path in found.items()}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(text):
    tree = ast.parse(text)
    known = roots(tree)
    texts = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        path = ""
        if isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            path = f"{known[root]}.{rest}" if root in known else ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            path = " ".join(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            path = " ".join(alias.name for alias in node.names if alias.name.partition(".")[0] in PACKAGES)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            path = node.value if re.fullmatch(r"(torch|triton)\.[\w.]+", node.value) else ""
        elif isinstance(node, ast.Call) and dotted(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            root, _, rest = dotted(node.args[0]).partition(".")
            path = ".".join(filter(None, (known[root], rest, str(node.args[1].value)))) if root in known else ""
        if PRIVATE.search(path):
            yield path


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
PRIVATE = re.compile(r"\._(?!_)|triton\.(runtime|compiler|backends|experimental)")


@pytest.mark.parametrize(
    "text, found",
    [
        ("import torch\ntorch._C._get()", True),
        ("import torch.distributed as dist\ndist._x", True),
        ("from torch.utils import _pytree", True),
        ("from torch.utils._pytree import tree_map", True),
        ("from torch.distributed import distributed_c10d as c10d\nc10d.G._Options", True),
        ("import torch\ngetattr(torch._C, name, None)", True),
        ("import torch\ngetattr(torch, '_assert_async')", True),
        ("import_module('triton.runtime.jit')", True),
        ("import torch\ntorch.__version__\ntorch.nn.functional.linear", False),
        ("import other\nother._C", False),
    ],
)
def test_the_search_sees_private_names(text, found):
    assert bool(list(private_names(text))) == found


def test_no_other_module_asks_for_a_private_name():
    files = [*(TREE / "shim").rglob("*.py"), *(TREE / "patches").rglob("*.py")]
    files.remove(Path(_torch_names.__file__))
    assert len(files) > 300
    found = {str(file.relative_to(TREE)): set(private_names(file.read_text("utf-8"))) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


# ---- without a name


def test_a_missing_name_is_told_with_what_it_costs(monkeypatch):
    path = "torch:_C._current_graph_task_id"
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert find(path) is None
    with pytest.raises(MissingNameError, match=r"torch \S+ has no torch\._C\._current_graph_task_id: PagedStash"):
        required(path)
    with pytest.raises(KeyError):
        find("torch:_C._not_in_the_table")


@pytest.mark.parametrize(
    "owner, name",
    [
        ("torch._C", "_current_graph_task_id"),
        ("torch._C._autograd", "_get_sequence_nr"),
        ("torch._C._functorch", "peek_interpreter_stack"),
        ("torch.autograd.forward_ad", "_current_level"),
    ],
)
def test_a_stash_does_nothing_without_a_name_and_says_so(monkeypatch, owner, name):
    stash, layer = PagedStash(100, page_size=4), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    rows = torch.randn(16, 8, requires_grad=True)
    monkeypatch.delattr(f"{owner}.{name}")
    out = stash.run(layer, rows, rows=16, valid=5)
    out.sum().backward()
    assert rows.grad is not None and [name in reason for reason in stash.skipped] == [True]


def test_functions_stay_outside_of_graphs_without_the_private_name(monkeypatch):
    """torch itself needs the name when it imports the compiler."""
    import torch._dynamo

    monkeypatch.delattr(torch, "_disable_dynamo")
    function = outside_graph(torch.sin)
    assert torch.equal(function(torch.ones(1)), torch.ones(1).sin())


def with_one_device():
    from shim.testing.layout import _one_device

    gloo = torch.distributed.ProcessGroupGloo
    with _one_device():
        return torch.distributed.distributed_c10d.ProcessGroupGloo is not gloo


def test_a_layout_does_without_options_of_gloo(monkeypatch):
    assert with_one_device()
    monkeypatch.delattr(torch.distributed.ProcessGroupGloo, "_Options")
    assert not with_one_device()
