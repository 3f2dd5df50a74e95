"""te-requires-grad: a quantized tensor answers as autograd does, however it came to be."""

import pytest
import torch
from needed import needed

import shim
from shim._torch_names import required
from shim.patches.transformer_engine._proof_mxfp8 import weight
from shim.patches.transformer_engine.te_requires_grad.proof import Quantize, Scale, quantized

CELLS = {"0.17.1+2.14.1": "all"}

ID = "te-requires-grad"
pytestmark = needed(ID)


@pytest.fixture
def patched():
    with shim.patched(only=[ID], require=[ID]):
        yield


def truth(tensor):
    """What torch says, without asking the tensor's class."""
    with required("torch:_C.DisableTorchFunctionSubclass")():
        return torch.Tensor.requires_grad.__get__(tensor)


@pytest.mark.parametrize("given", [True, False])
def test_the_output_of_a_function_answers_as_autograd_does(patched, given):
    _, tensor = quantized(given)
    assert tensor.requires_grad is truth(tensor) is given
    assert (tensor.grad_fn is not None) == given


def test_stock_remembers():
    assert quantized()[1].requires_grad is False


def test_a_tensor_that_was_made_before_answers_as_well():
    _, tensor = quantized()
    with shim.patched(only=[ID], require=[ID]):
        assert tensor.requires_grad is True
    assert tensor.requires_grad is False


@pytest.mark.parametrize("change", ["setter", "method", "parameter", "detached", "no_grad"])
def test_a_leaf_answers_as_on_stock(change):
    def answers():
        tensor = weight(device="cpu")
        found = [tensor.requires_grad]
        if change == "setter":
            tensor.requires_grad = True
        elif change == "method":
            assert tensor.requires_grad_() is tensor
        elif change == "parameter":
            tensor = torch.nn.Parameter(tensor)
        elif change == "detached":
            tensor = tensor.requires_grad_().detach()
        else:
            with torch.no_grad():
                tensor = weight(device="cpu", requires_grad=True)
        return [*found, tensor.requires_grad, truth(tensor)]

    expected = answers()
    with shim.patched(only=[ID], require=[ID]):
        assert answers() == expected
    assert expected[1] is expected[2]


def test_autograd_s_refusal_stays(patched):
    """A tensor within the graph cannot be told to require no gradient."""
    _, tensor = quantized()
    with pytest.raises(RuntimeError, match="leaf"):
        tensor.requires_grad = False
    assert tensor.requires_grad is True


def test_it_is_still_a_documented_property(patched):
    kind = type(weight(device="cpu"))
    assert isinstance(kind.requires_grad, property)
    assert kind.requires_grad.fset is not None


def test_it_holds_under_recompute(patched):
    source = torch.ones(128, 256, requires_grad=True)
    answers = []

    def run(given):
        tensor = Quantize.apply(given)
        answers.append(tensor.requires_grad)
        return Scale.apply(tensor, tensor.requires_grad)

    torch.utils.checkpoint.checkpoint(run, source, use_reentrant=False).sum().backward()
    assert answers == [True, True]
    assert source.grad.unique().tolist() == [2.0]
