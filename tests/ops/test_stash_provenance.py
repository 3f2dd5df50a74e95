"""The paged stash: what it takes for rows, whatever the shapes, and what it leaves alone with a reason."""

import contextlib
import copy
import dataclasses
import functools
import pickle
import types

import pytest

torch = pytest.importorskip("torch")

from stash_cases import ample, assert_nothing_lives  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.functional import layer_norm, linear, silu  # noqa: E402

from shim.ops.paged_stash import PagedStash  # noqa: E402

N, VALID = 16, 5  # as many rows as columns, and as rows and columns of weights


def generator():
    return torch.Generator().manual_seed(0)


def weight(*shape, kind=torch.nn.Parameter):
    value = torch.randn(*shape, generator=generator())
    return torch.nn.Parameter(value) if kind is torch.nn.Parameter else value.requires_grad_(kind)


PARAMETER, LEAF, FROZEN = weight(N, N), weight(N, N, kind=True), weight(N, N, kind=False)
HALVES = weight(N, N // 2), weight(N, N // 2)
EXPERTS = weight(2, N, N)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class WideProduct(Product):
    """Saves what it has made for itself, of both inputs."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x.double(), w.double())
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        return tuple(one.float() for one in Product.backward(ctx, grad.double()))


def in_bfloat16(x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cat([part @ w for part, w in zip(x.split(N // 2), EXPERTS)])


def grouped(x):
    return torch.bmm(x.view(2, N // 2, N), EXPERTS).flatten(0, 1).sin()


def one_by_one(x):
    parts = x.view(2, N // 2, N).unbind(0)
    return torch.stack([part.exp() @ w for part, w in zip(parts, EXPERTS)]).view(N, N)


class Unregistered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = [torch.nn.Linear(N, N)]

    def forward(self, x):
        return self.parts[0](x).sin()


# What is right with it, and how many tensors are stashed.
FUNCTIONS = {
    "a lambda": (lambda x: (x @ LEAF).sin(), 2),
    "a partial": (functools.partial(linear, weight=PARAMETER), 1),
    "a bound forward": (Unregistered().forward, 2),
    "an unregistered module": (Unregistered(), 2),
    "a frozen weight": (lambda x: (x.sin() @ FROZEN).exp(), 2),
    "weights in one": (lambda x: x @ torch.cat(HALVES, 1), 1),
    "a slice of a copy": (lambda x: x @ (PARAMETER * 1)[:, :8].clone(), 1),
    "autocast, all experts in one": (in_bfloat16, 2),
    "a function of one's own": (lambda x: Product.apply(x.sin(), LEAF * 1), 2),
    "frozen times trained": (lambda x: Product.apply(x, FROZEN @ LEAF), 1),
    "made within a function": (lambda x: WideProduct.apply(x, LEAF), 0),
    "a product for all experts": (grouped, 2),
    "a product for each expert": (one_by_one, 2),
    "weights on the left": (lambda x: LEAF.softmax(-1) @ x.sin(), 0),
    "attention": (lambda x: (x @ x.t()).softmax(-1) @ x, 2),
    "norms": (lambda x: silu(layer_norm(x @ LEAF, (N,))) @ LEAF, 4),
    "flipped behind": (lambda x: x.sin().flip(0), 0),
    "flipped before": (lambda x: x.flip(0).sin(), 1),
    "shuffled": (lambda x: x.sin()[torch.randperm(N, generator=generator())], 0),
    "sorted": (lambda x: x.sin().sort(0).values, 0),
    "rolled": (lambda x: x.sin().roll(3, 0), 0),
    "transposed": (lambda x: x.sin().t().exp().t(), 0),
    "the mean of all": (lambda x: x.exp() - x.exp().mean(0), 1),
    "changed in place by rows": (lambda x: x.sin().clone().index_add_(0, torch.arange(N).flip(0), x), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_known_by_where_they_come_from(name):
    function, stashed = FUNCTIONS[name]
    stash, found = ample(), []
    for one in (stash, None):
        x = torch.randn(N, N, generator=generator()).requires_grad_()
        output = function(x) if one is None else stash.run(function, x, rows=N, valid=VALID)
        found.append(torch.autograd.grad(output[:VALID].float().square().sum(), [x])[0])
    assert torch.equal(*found)
    assert stash.statistics().stashed == stashed and (stashed or stash.skipped)


def test_weights_that_are_handed_in_a_dict():
    module, stash, found = torch.nn.Linear(N, N, bias=False), ample(), []

    def call(weights, x):
        return torch.func.functional_call(module, weights, (x,)) + Product.apply(x, weights["weight"])

    for one in (stash, None):
        x = torch.randn(N, N, generator=generator()).requires_grad_()
        weights = {"weight": module.weight.double().float()}
        output = call(weights, x) if one is None else stash.run(call, weights, x, rows=N, valid=VALID)
        found.append(torch.autograd.grad(output[:VALID].square().sum(), [x])[0])
    assert torch.equal(*found) and stash.statistics().stashed == 1


def test_without_inputs_functions_of_ones_own_are_left_alone():
    stash, x = ample(), torch.randn(N, N, requires_grad=True)
    with stash.group(N, VALID) as group:
        output = Product.apply(x, LEAF * 1).sin()
    group.commit(output)
    assert stash.live == 1 and any("come from the inputs" in reason for reason in stash.skipped)


# Features of autograd


def root(x):
    return (x.square() + 1).sqrt()


def of_valid(function, x):
    return torch.autograd.grad(function(x)[:VALID].sum(), [x])[0]


def test_what_was_compiled_is_left_alone():
    stash, x = ample(), torch.randn(N, N, requires_grad=True)
    compiled = torch.compile(root, backend="aot_eager")
    found = of_valid(lambda x: stash.run(compiled, x, rows=N, valid=VALID), x)
    assert torch.allclose(found, of_valid(root, x))
    assert stash.statistics().stashed == 0 and any("torch.compile" in reason for reason in stash.skipped)


def test_pages_come_back_although_a_record_is_collected_while_something_is_traced():
    """The collector may run at any time, and then operators of the thread get no real tensors."""
    stash, x = ample(), torch.randn(N, N, requires_grad=True)
    output = stash.run(torch.sin, x, rows=N, valid=VALID)
    with FakeTensorMode():
        del output
    assert of_valid(lambda x: stash.run(torch.sin, x, rows=N, valid=VALID), x) is not None
    assert_nothing_lives(stash)


def squared_relu(x):
    return x.relu().square()


def saves_for_itself(x):
    return (x.sin() * 2).tanh()


@pytest.mark.parametrize("function", [squared_relu, saves_for_itself])
@pytest.mark.parametrize("named", [True, False], ids=["named", "another is named"])
def test_what_was_compiled_of_a_known_function_is_stashed(function, named):
    """Although another region has the same shapes; and what is before it is stashed, too."""
    known, other = torch.compile(function, backend="aot_eager"), torch.compile(root, backend="aot_eager")
    compiled = known if named else other
    stash, found = ample(), []
    for one in (stash, None):
        x = torch.randn(N, N, generator=generator()).requires_grad_()
        with contextlib.ExitStack() as stack:
            if one is not None:
                group = stack.enter_context(one.group(N, VALID, inputs=[x], weights=[LEAF], compiled=[known]))
            output = compiled(x.sin() @ LEAF) @ LEAF
        if one is not None:
            group.commit(output)
            # the operand of each product, that of sin, and what the region has saved
            assert one.live >= 4 if named else one.live == 1
            assert named != any("torch.compile" in reason for reason in one.skipped)
        found.append(of_valid(lambda _: output, x))
    assert torch.equal(*found)


IN_PLACE = {
    "a whole tensor": (lambda x: (x.sin() @ LEAF).add_(1).mul_(2).relu_(), 3),
    "a view": (lambda x: halved(x.sin()), 0),
}


def halved(x):
    x = x * 1
    x[:, : N // 2].mul_(0.5).tanh_()
    return x


@pytest.mark.parametrize("where", IN_PLACE)
def test_operators_in_place(where):
    function, stashed = IN_PLACE[where]
    stash, found = ample(), []
    for one in (stash, None):
        x = torch.randn(N, N, generator=generator()).requires_grad_()
        found.append(of_valid(function if one is None else lambda x: stash.run(function, x, rows=N, valid=VALID), x))
    assert torch.equal(*found)
    assert stash.statistics().stashed == stashed and (stashed or any("CopySlices" in one for one in stash.skipped))


def test_no_pool_is_made_while_a_graph_is_captured(monkeypatch):
    """A capture needs a GPU; what is asked for it is not, and a tensor only says that it is on one."""
    monkeypatch.setattr("shim.ops.paged_stash.capturing", lambda: True)
    tensor = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    stash = PagedStash(4)
    with pytest.raises(RuntimeError, match="run the same step once before"):
        stash.pool_for(tensor, N)
    assert not stash.pools


@pytest.mark.parametrize("how", ["run", "group"])
def test_what_is_being_compiled_is_left_alone(how):
    stash, x = ample(), torch.randn(N, N, requires_grad=True)

    def caller(x):
        if how == "run":
            return stash.run(root, x, rows=N, valid=VALID) * 2
        with stash.group(N, VALID) as group:
            y = root(x)
        group.commit(y)
        return y * 2

    found = of_valid(torch.compile(caller, backend="aot_eager"), x)
    assert torch.allclose(found, of_valid(lambda x: root(x) * 2, x)) and stash.statistics().stashed == 0


def test_transforms_of_functions_are_left_alone():
    stash, x = ample(), torch.randn(N, N)

    def stashed(x):
        return stash.run(torch.sin, x, rows=N, valid=VALID)[:VALID]

    assert torch.equal(torch.func.grad(lambda x: stashed(x).sum())(x)[:VALID], x[:VALID].cos())
    output, pull = torch.func.vjp(stashed, x)
    assert torch.equal(pull(torch.ones_like(output))[0][:VALID], x[:VALID].cos())
    assert torch.equal(torch.func.jvp(stashed, (x,), (x,))[1], x[:VALID].cos() * x[:VALID])
    weights = torch.randn(3, N)
    mapped = torch.func.vmap(lambda w: stashed(x * w))(weights)
    assert torch.equal(mapped, (x * weights[:, None]).sin()[:, :VALID])
    leaf = x.clone().requires_grad_()  # autograd around the transform
    torch.func.vmap(lambda w: stashed(leaf * w))(weights).sum().backward()
    wanted = torch.autograd.grad((leaf * weights[:, None]).sin()[:, :VALID].sum(), [leaf])[0]
    assert torch.allclose(leaf.grad, wanted)
    assert stash.statistics().stashed == 0 and any("torch.func" in reason for reason in stash.skipped)


def test_forward_mode_over_backward_has_its_tangents():
    found = []
    for stash in (ample(), None):
        x = torch.randn(N, N, generator=generator()).requires_grad_()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones(N, N))
            output = dual.sin() if stash is None else stash.run(torch.sin, dual, rows=N)
            (grad,) = torch.autograd.grad(output.sum(), [x], create_graph=True)
            found.append(torch.autograd.forward_ad.unpack_dual(grad).tangent)
    assert torch.equal(*found)


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    number: int = 0


class Opaque:
    def __init__(self, y):
        self.y = y


def test_tensors_in_a_dataclass_are_found_and_elsewhere_there_is_a_reason():
    x = torch.randn(N, N, requires_grad=True)
    for kind, live in (Output, 1), (Opaque, 0):
        stash = ample()
        output = stash.run(lambda x: kind(x.sin()), x, rows=N, valid=VALID)
        assert stash.live == live
        assert live or any("Opaque" in reason for reason in stash.skipped)
        assert torch.equal(of_valid(lambda x: output.y, x)[:VALID], x[:VALID].cos())


def duplicate_by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, duplicate_by_pickle])
def test_a_copy_is_a_new_stash_with_the_same_settings(duplicate):
    stash = PagedStash(7, page_size=3, host_pages=2, overflow="spill", backend="eager")
    output = stash.run(torch.sin, torch.randn(N, N, requires_grad=True), rows=N)
    module = torch.nn.Linear(2, 2)
    module.stash = stash
    found = duplicate(module).stash
    assert found is not stash and output is not None
    for name in ("pages", "page_size", "host_pages", "overflow", "backend"):
        assert getattr(found, name) == getattr(stash, name)
    assert stash.live == 1 and found.live == 0 and not found.pools
    assert torch.equal(duplicate(module).weight, module.weight)


def test_memory_of_pools_that_nothing_uses_is_freed_and_comes_back(monkeypatch):
    monkeypatch.setattr("shim.ops.paged_stash.UNUSED", 3)
    stash = ample()

    def step(width):
        stash.run(torch.sin, torch.randn(N, width, requires_grad=True), rows=N).sum().backward()
        return {use.width: use.pages for use in stash.statistics().pools}

    sizes = step(8)
    assert sizes == {8: 1000}
    held = stash.run(torch.sin, torch.randn(N, 12, requires_grad=True), rows=N)
    for _ in range(9):
        sizes = step(16)
    assert sizes == {8: 1000, 12: 1000, 16: 1000}, "a microbatch is between its passes"
    held.sum().backward()
    stash.pools[held.device, held.dtype, 12].captured = True  # a CUDA graph uses it
    for _ in range(9):
        sizes = step(16)
    assert sizes == {8: 0, 12: 1000, 16: 1000}
    stash.resize_all()
    stash.resize(lambda pool: (1000, 0))
    assert stash.statistics().pools[0].pages == 0
    assert step(8)[8] == 1000 and stash.statistics().stashed == 21 and stash.statistics().lost == 0
