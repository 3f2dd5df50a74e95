"""A trainer's CheckpointFunction.backward that frees the inputs of checkpoints, but for those of MTP layers (verl's).

Rebuilt in small around upstream's own backward; tests/integration/test_verl.py has the real one.
"""

import functools

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CheckpointFunction
from mtp_recompute_cases import ID, PACKED, VERSION, build, row_of, train
from norm_that_keeps_its_output import KeepsItsOutput
from recompute_cases import METHODS, equal_bits

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.16.0": "all"}

ABOUT = ["mtp-recompute"]  # the patches, see chosen.py

pytestmark = pytest.mark.skipif(VERSION < (0, 14), reason="no _checkpointed_forward before 0.14")


@pytest.fixture(autouse=True)
def one_rank():
    with testing.layout_initialised(Layout()), shim.patched(require=[ID, PACKED]):
        yield


@pytest.fixture
def freeing(monkeypatch):
    """Frees what a checkpoint saved, after its backward; no layer lies in the closure of what is spared."""
    original = CheckpointFunction.backward

    def backward(ctx, *grads):
        result = original(ctx, *grads)
        result = tuple(grad.clone() if isinstance(grad, torch.Tensor) else grad for grad in result)
        held = [cell.cell_contents for cell in getattr(ctx.run_function, "__closure__", None) or ()]
        if not any(type(value).__name__ == "MultiTokenPredictionLayer" for value in held):
            for tensor in ctx.saved_tensors:
                if tensor is not None and tensor.requires_grad:
                    tensor.untyped_storage().resize_(0)
        return result

    monkeypatch.setattr(CheckpointFunction, "backward", staticmethod(backward))


def inputs_of_layers(model):
    """The storages of what MTP layers get, filled while the model runs."""
    found = []

    def remember(module, args, kwargs):
        found.extend(kwargs[name].untyped_storage() for name in ("hidden_states", "decoder_input") if name in kwargs)

    for layer in model.mtp.layers:
        layer.register_forward_pre_hook(remember, with_kwargs=True)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_no_input_of_an_mtp_layer_is_freed(freeing, method):
    """Also where the norm before the layers saved that very tensor."""
    results = []
    for chosen in (None, method):
        model = build(chosen)
        model.decoder.final_layernorm = Norm()
        found = inputs_of_layers(model)
        results.append(train(model, row_of("padded")))
        assert found and all(storage.size() for storage in found)
    assert equal_bits(*results)


class Norm(torch.nn.Module):
    def forward(self, hidden):
        return KeepsItsOutput.apply(hidden)


def own_recompute(self, *args, forward_func=None, **kwargs):
    """A trainer's, whose closure holds no layer."""
    if args and not isinstance(args[0], torch.Tensor):
        forward_func, args = args[0], args[1:]
    function = forward_func or self._proj_and_transformer_layer
    names = ("hidden_states", "decoder_input")
    tensors = dict(zip(names, args)) | {name: kwargs.pop(name) for name in names if name in kwargs}
    run = functools.partial(_named, function, tuple(tensors), kwargs)
    return tensor_parallel.checkpoint(run, False, *tensors.values())


def _named(function, names, kwargs, *tensors):
    return function(**dict(zip(names, tensors)), **kwargs)


def with_own_recompute(method):
    model = build(method)
    for layer in model.mtp.layers:
        layer._checkpointed_forward = own_recompute.__get__(layer)
    return model


def test_check_sees_that_another_recompute_lets_its_inputs_be_freed(freeing):
    """check() tries it, finds the inputs gone, and reads none of them."""
    assert shim.check(build("uniform 1"))[ID].state == "applied"
    with pytest.raises(shim.NotMetError, match=f"{ID} is shadowed.*{__file__}"):
        shim.check(with_own_recompute("uniform 1"))


def test_the_same_recompute_under_upstreams_backward_is_right():
    assert shim.check(with_own_recompute("uniform 1"))[ID].state == "applied"
