"""What needs torch: autograd functions, torch.compile, and check() on real modules."""

import pytest
from fake_world import same

import shim

CORE = "megatron.core."

SOURCE = """
    import functools


    def wrap(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return original(*args, **kwargs) * 3

        return wrapper


    def bindings(variant, options):
        return dict.fromkeys(TARGETS, wrap)
    """


@pytest.fixture
def torch():
    """Imported by the first test that needs it: at collection it would make the tests of other files slower."""
    return pytest.importorskip("torch")


@pytest.fixture
def torch_world(world, torch):
    world.module(
        "autograd",
        """
        import torch


        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 2


        apply = Twice.apply


        def double(x):
            return x * 2


        class Module(torch.nn.Module):
            def forward(self, x):
                return double(x)


        class Heir(Module):
            pass
        """,
    )
    world.patch("function", [CORE + "autograd:Twice.forward", CORE + "autograd:Twice.backward"], SOURCE)
    world.patch("plain", [CORE + "autograd:double", CORE + "autograd:Module.forward"], SOURCE)
    return world


def gradient(torch, apply):
    x = torch.ones(2, requires_grad=True)
    y = apply(x)
    y.sum().backward()
    return y[0].item(), x.grad[0].item()


def test_an_autograd_function_is_patched_as_a_pair(torch_world, torch):
    """forward and backward of a torch.autograd.Function are bound together, also through an apply taken earlier."""
    apply = torch_world.get("autograd:apply")
    before = torch_world.snapshot("autograd")
    shim.apply()
    assert gradient(torch, apply) == (6.0, 6.0)
    shim.revert()
    assert gradient(torch, apply) == (2.0, 2.0)
    assert same(before, torch_world.snapshot("autograd")) == []


def test_of_an_autograd_function_losing_one_takes_both(torch_world, torch):
    """shim takes its backward out of a foreign one on top, so that forward and backward are both upstream's again."""
    apply = torch_world.get("autograd:apply")
    shim.apply()
    cls = torch_world.get("autograd:Twice")
    ours = cls.backward
    cls.backward = staticmethod(lambda ctx, grad: ours(ctx, grad))
    shim.revert()
    assert gradient(torch, apply) == (2.0, 2.0)


def test_compile_sees_a_patched_function(torch_world, torch):
    """torch.compile(fullgraph=True) runs what is bound, after apply() and again after revert()."""
    torch_world.get("autograd:double")
    x = torch.ones(2)

    def run():
        torch._dynamo.reset()
        module = torch_world.get("autograd:Module")()
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        return compiled(x)[0].item()

    assert run() == 2.0
    shim.apply()
    assert run() == 18.0
    shim.revert()
    assert run() == 2.0


def test_a_caller_compiled_earlier_sees_the_patch(torch_world, torch):
    """A caller that was compiled before apply() is compiled anew where a function of a module is bound, and again
    after revert(). A method of a class is out of reach of what was compiled earlier: torch does not guard on it."""
    torch._dynamo.reset()
    torch_world.module(
        "caller", "from megatron.core.autograd import double\n\n\ndef call(x):\n    return double(x) + 0\n"
    )
    compiled = torch.compile(torch_world.get("caller:call"), fullgraph=True, backend="eager")
    x = torch.ones(2)
    assert compiled(x)[0].item() == 2.0
    shim.apply()
    assert compiled(x)[0].item() == 6.0
    shim.revert()
    assert compiled(x)[0].item() == 2.0


def test_check_finds_overrides_in_a_model(torch_world, torch):
    """check(model) names the class and the line of a module, however deep, whose forward is not the patched one."""
    cls, heir = torch_world.get("autograd:Module"), torch_world.get("autograd:Heir")
    shim.apply()

    class Own(cls):
        def forward(self, x):
            return x

    fine = torch.nn.Sequential(cls(), torch.nn.Sequential(heir()))
    assert shim.check(fine)["plain"].state == "applied"
    report = shim.check([fine, torch.nn.Sequential(torch.nn.ModuleList([Own()]))])
    assert report["plain"].state == "unknown"  # it has no probe
    line = Own.forward.__code__.co_firstlineno
    assert "Own" in report["plain"].reason and f"test_with_torch.py:{line}" in report["plain"].reason
    assert report["function"].state == "applied"
    bound = heir()
    bound.forward = lambda x: x
    report = shim.check(torch.nn.Sequential(bound))
    assert "Heir" in report["plain"].reason and "test_with_torch.py" in report["plain"].reason


def test_a_model_checkpoint_is_the_same(torch_world, torch):
    """The state_dict of a model built while applied has the keys it has without shim."""
    linear = torch.nn.Sequential(torch_world.get("autograd:Module")(), torch.nn.Linear(2, 2))
    keys = list(linear.state_dict())
    shim.apply()
    assert list(torch.nn.Sequential(torch_world.get("autograd:Module")(), torch.nn.Linear(2, 2)).state_dict()) == keys
