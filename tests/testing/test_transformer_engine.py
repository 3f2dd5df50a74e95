"""Transformer Engine's real Python sources without its compiled part, each release in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from thorough import times

from shim import testing

TOP = Path(__file__).parents[2]
RELEASES = times(("2.9.0", "2.20.2"), ("2.1.0", "2.9.0", "2.20.2"))  # pairs run the layer of every release they are of

# Prints what it saw as JSON in its last line; where the release itself is at stake, the tests say what is expected.
OBSERVE = """
import functools, importlib.util, json, os, sys
from shim import testing
from shim._engine.import_hook import ImportHook

seen = {"hooked": []}
hook = ImportHook(
    wants=lambda name: name.startswith("transformer_engine"),
    before=lambda module: None,
    after=lambda *_: seen["hooked"].append(_[0].__name__),
)
from_file = importlib.util.spec_from_file_location
if "hook-first" in sys.argv:
    hook.install()
testing.transformer_engine_on_cpu()
testing.transformer_engine_on_cpu()
hook.install()
finders = len(sys.meta_path)

import transformer_engine
import transformer_engine.pytorch as te
import transformer_engine.pytorch.distributed
import transformer_engine_torch as tex
import torch.utils.checkpoint
from transformer_engine.common import recipe as recipes

seen["version"] = transformer_engine.__version__
seen["left"] = [name for name in os.environ if name.startswith("NVTE")]
seen["put back"] = importlib.util.spec_from_file_location is from_file and len(sys.meta_path) == finders
seen["loaders"] = [type(module.__spec__.loader).__name__ for module in (transformer_engine.common, te)]
functions = [vars(owner).get(name) for owner in (transformer_engine.common, te)
             for name in ("load_framework_extension", "get_te_path", "is_package_installed")]
seen["functions"] = sorted({f.__module__ for f in functions if f is not None})


def error(call, *args):
    try:
        call(*args)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"


seen["operation"] = error(tex.layernorm_fwd, torch.ones(2))
seen["class"] = error(tex.FP8TensorMeta)
seen["unknown"] = error(getattr, tex, "no_such_operation")
seen["inputs"] = [int(tex.FP8FwdTensors[name]) for name in ("GEMM1_INPUT", "GEMM1_WEIGHT", "GEMM2_WEIGHT")]
seen["gradients"] = [int(tex.FP8BwdTensors[name]) for name in ("GRAD_OUTPUT1", "GRAD_INPUT1", "GRAD_OUTPUT2")]
seen["dtypes"] = [(member.name, int(member)) for member in tex.DType]

before = {name: dict(vars(owner)) for name, owner in
          (("cuda", torch.cuda), ("distributed", te.distributed), ("manager", te.distributed.FP8GlobalStateManager))}
manager = te.distributed.FP8GlobalStateManager


def body(x, w):
    state = testing.fp8_state()
    phases.append([state.enabled, state.recompute_enabled, state.recompute_phase])
    return torch.nn.functional.dropout(torch.tanh(x @ w), 0.5)


def gradients(call):
    torch.manual_seed(3)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipes.DelayedScaling()):
        out = call(body, x, w)
    torch.nn.functional.dropout(out, 0.5).sum().backward()
    return torch.stack([x.grad, w.grad, x.detach(), torch.rand(4, 4)])


with testing.te_cuda_stand_ins():
    seen["outside"] = list(testing.fp8_state())
    with testing.record_fp8_events() as events:
        with te.fp8_autocast(enabled=True, calibrating=True, fp8_recipe=recipes.MXFP8BlockScaling(), fp8_group=None):
            state = testing.fp8_state()
            with te.fp8_autocast(enabled=False, fp8_recipe=recipes.DelayedScaling()):
                seen["inner"] = testing.fp8_state().enabled
            seen["again"] = testing.fp8_state() == state
        manager.reduce_and_update_fp8_tensors(forward=False)
    seen["inside"] = [*state[:2], type(state.recipe).__name__, *state[3:]]
    seen["events"] = [list(event) for event in events]
    with te.fp8_autocast(enabled=True, fp8_recipe=recipes.DelayedScaling()):
        with te.distributed.activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            first = testing.fp8_state()
        with te.distributed.activation_recompute_forward(activation_recompute=True, recompute_phase=True):
            second = testing.fp8_state()
    seen["flags"] = [list(first[4:]), list(second[4:])]
    phases = []
    plain = gradients(lambda function, *args: function(*args))
    phases = []
    checkpointed = gradients(te.distributed.checkpoint)
    seen["equal"] = torch.equal(plain, checkpointed)
    seen["phases"] = list(phases)
    forgetful = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True, preserve_rng_state=False)
    seen["equal by chance"] = torch.equal(plain, gradients(forgetful))
    state = te.distributed._get_cuda_rng_state()
    drawn = torch.rand(3)
    te.distributed._set_cuda_rng_state(state)
    seen["one generator"] = torch.equal(drawn, torch.rand(3))
with testing.te_cuda_stand_ins((9, 0)):
    seen["refused"] = error(lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipes.MXFP8BlockScaling()).__enter__())
    manager.reset()
seen["changed"] = [
    f"{place} {name}"
    for place, owner in (("cuda", torch.cuda), ("distributed", te.distributed), ("manager", manager))
    for name, was in before[place].items()
    if vars(owner).get(name) is not was and (callable(was) or isinstance(was, classmethod) or place == "cuda")
]
print(json.dumps(seen))
"""


def python(code, *argv, path=()):
    env = {name: value for name, value in os.environ.items() if not name.startswith("NVTE")}
    env = testing.environment([*path, TOP], env)
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code, *argv], env=env, capture_output=True, text=True)


def files(directory):
    """All but what Python itself keeps there: other tests import the same release meanwhile."""
    return {
        path.relative_to(directory): path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    }


@pytest.fixture(scope="module", params=RELEASES)
def seen(request):
    directory = testing.fetch(request.param, "transformer-engine")
    before = files(directory)
    order = ["hook-first"] if request.param == "2.9.0" else []
    done = python(OBSERVE, *order, path=[directory])
    assert done.returncode == 0, done.stderr
    return {
        **json.loads(done.stdout.splitlines()[-1]),
        "release": request.param,
        "written": before != files(directory),
        "number": tuple(int(part) for part in request.param.split(".")[:2]),
    }


def test_the_real_sources_are_imported(seen):
    assert seen["version"] == seen["release"]
    assert seen["loaders"] == ["SourceFileLoader"] * 2
    assert {"transformer_engine.common", "transformer_engine.pytorch"} <= set(seen["hooked"])


def test_nothing_is_left_behind(seen):
    assert seen["put back"] and not seen["left"] and not seen["written"]
    assert seen["functions"] == ["transformer_engine.common"]
    assert seen["changed"] == []


def test_a_compiled_operation_is_named_when_it_is_called(seen):
    assert seen["operation"].startswith("CompiledOpError: transformer_engine_torch.layernorm_fwd was called")
    assert "machine that has the extension" in seen["operation"]
    assert seen["class"].startswith("CompiledOpError: transformer_engine_torch.FP8TensorMeta was called")
    assert seen["unknown"].startswith("AttributeError")


def test_the_members_of_its_enumerations_are_distinct(seen):
    names, values = zip(*seen["dtypes"])
    assert {"kByte", "kInt32", "kFloat32", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2"} <= set(names)
    assert len(set(values)) == len(names)


def test_modules_find_their_quantizers(seen):
    """By the places that the compiled library gives them, not by their names in order."""
    assert (seen["inputs"], seen["gradients"]) == ([0, 1, 4], [0, 1, 2])


def test_the_state_follows_the_contexts(seen):
    assert seen["outside"] == [False, False, None, None, False, False]
    assert seen["inside"] == [True, True, "MXFP8BlockScaling", None, False, False]
    assert seen["inner"] is False and seen["again"]
    assert seen["flags"] == [[True, False], [True, True]]


def test_events_are_in_order(seen):
    assert seen["events"] == [
        ["enter", True, "MXFP8BlockScaling", 1, None],
        ["enter", False, "DelayedScaling", 2, None],
        ["exit", False, "DelayedScaling", 1, None],
        ["exit", True, "MXFP8BlockScaling", 0, None],
        ["reduce", False, None, 0, True],
        ["reduce", False, None, 0, False],
    ]


def test_a_checkpoint_draws_the_same_dropout(seen):
    assert seen["equal"] and not seen["equal by chance"] and seen["one generator"]
    again = {(2, 1): [False, False, True], (2, 9): [True, False, True], (2, 20): [True, True, True]}
    assert seen["phases"] == [[True, True, False], again[seen["number"]]]


def test_the_compute_capability_decides(seen):
    assert "capability 10.0 or higher" in seen["refused"]


def test_an_engine_that_was_imported_before_is_an_error(monkeypatch):
    finders = list(sys.meta_path)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    with pytest.raises(RuntimeError, match=r"transformer_engine was imported before.*call it first, in a new process"):
        testing.transformer_engine_on_cpu()
    assert sys.meta_path == finders


def test_an_engine_that_does_not_import_is_not_taken_for_a_missing_one(tmp_path):
    package = tmp_path / "transformer_engine"
    for name, source in {
        "__init__": "import transformer_engine.common\ntry:\n from . import pytorch\nexcept ImportError: pass",
        "common/__init__": "import os\nassert os.environ['NVTE_PROJECT_BUILDING'] == '1'",
        "pytorch/__init__": "import no_such_dependency",
    }.items():
        (package / f"{name}.py").parent.mkdir(exist_ok=True, parents=True)
        (package / f"{name}.py").write_text(source)
    code = "from shim import testing; testing.transformer_engine_on_cpu(); import transformer_engine"
    done = python(code, path=[tmp_path])
    assert done.returncode == 1
    assert "does not import with shim.testing's stand-in" in done.stderr
    assert "no_such_dependency" in done.stderr.splitlines()[-1]


def test_without_an_engine_the_extension_is_missing_as_well():
    code = "from shim import testing; testing.transformer_engine_on_cpu(); import transformer_engine_torch"
    done = python(code)
    assert "ModuleNotFoundError: No module named 'transformer_engine_torch'" in done.stderr
