"""Patch mtp-recompute on a real release: layers are really run again, and less is saved for backward."""

import contextlib
import copy

import pytest
import torch
from megatron.core import tensor_parallel
from mtp_recompute_cases import (
    ROWS,
    applied_on_one_rank,
    build,
    calls_of,
    expected_calls,
    layer_inputs,
    of_each_method,
    output_of,
    row_of,
    train,
)

from shim.patches.megatron_core.mtp_recompute.proof import saved_bytes

CELLS = {"0.12.3": "all"}


@pytest.fixture(scope="module")
def applied():
    with applied_on_one_rank() as report:
        yield report


@pytest.mark.parametrize("kind", ROWS)
@of_each_method
def test_layers_are_recomputed(applied, method, kind):
    """Forward without gradients, once more with them in backward; in training only."""
    model = build(method)
    calls = calls_of(model)
    train(model, row_of(kind))
    assert calls == expected_calls(method)
    evaluated = build(method).eval()
    calls = calls_of(evaluated)
    train(evaluated, row_of(kind))
    assert calls == [[True], [True]]


def test_nothing_is_recomputed_unless_asked_for(applied):
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    for options in ({}, selective):
        model = build(**options)
        calls = calls_of(model)
        train(model, row_of("padded"))
        assert calls == [[True], [True]]


def bytes_saved(method, kind):
    model = build(method)
    with saved_bytes(model) as count:
        train(model, row_of(kind))
        return count()


@pytest.mark.parametrize("kind", ["unpacked", "padded"])
def test_less_is_saved_for_backward(applied, kind):
    """Within the MTP layers alone, so that what the decoder saves plays no part: their two inputs and token ids."""
    none, uniform, block1, block2 = (bytes_saved(m, kind) for m in (None, "uniform 1", "block 1", "block 2"))
    assert uniform == block2 and block1 == [uniform[0], none[1]]
    inputs = 2 * row_of(kind).total * 32 * 4
    assert all(inputs <= size <= 1.25 * inputs for size in uniform), (uniform, inputs)
    assert all(4 * size < full for size, full in zip(uniform, none)), (uniform, none)


@contextlib.contextmanager
def checkpoint_inputs(layer, monkeypatch):
    """The tensors that tensor_parallel.checkpoint is given while this layer runs, and the layer's own arguments."""
    inside, found, given, original = [], [], {}, tensor_parallel.checkpoint

    def spy(function, distribute, *values):
        if inside:
            found.append(values)
        return original(function, distribute, *values)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_parallel, "checkpoint", spy)

        def begin(module, args, kwargs):
            inside.append(module)
            given.update(kwargs)

        enter = layer.register_forward_pre_hook(begin, with_kwargs=True)
        leave = layer.register_forward_hook(lambda *_: inside.clear())
        yield found, given
        enter.remove()
        leave.remove()


@pytest.mark.parametrize("kind", ROWS)
def test_a_checkpoint_is_given_two_tensors(applied, monkeypatch, kind):
    """hidden_states and decoder_input; rows, masks and rotary tables have no gradient and are in the function."""
    model, embedded = build("uniform 1", layers=1), []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output.detach()))
    with checkpoint_inputs(model.mtp.layers[0], monkeypatch) as (found, given):
        train(model, row_of(kind))
    [(hidden, decoder_input)] = found
    assert torch.equal(hidden, given["hidden_states"]) and torch.equal(decoder_input, embedded[-1])


def test_other_tensors_are_given_for_their_gradient(applied, monkeypatch):
    """A rotary table that is trained gets the gradient it has without recompute; a mask beside it stays outside."""
    gradients = []
    for method in (None, "uniform 1"):
        model = build(method, layers=1)
        layer, table = model.mtp.layers[0], model.rotary_pos_emb(16).detach().clone().requires_grad_()
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        with checkpoint_inputs(layer, monkeypatch) as (found, _):
            inputs = layer_inputs(model, rotary_pos_emb=table)
            inputs["hidden_states"].requires_grad_()
            output = output_of(layer, {**inputs, "attention_mask": mask})
        output.square().sum().backward()
        gradients.append([table.grad, inputs["hidden_states"].grad])
        assert table.grad.any()
        if method:
            [values] = found
            assert len(values) == 3 and sum(value is table for value in values) == 1
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_without_gradients_nothing_is_saved(applied, method):
    """A layer in training mode under no_grad, as when a reference is computed: the same output."""
    model, plain = build(method, layers=1), build(layers=1)
    with torch.no_grad():
        output = output_of(model.mtp.layers[0], layer_inputs(model))
        assert not output.requires_grad
        assert torch.equal(output, output_of(plain.mtp.layers[0], layer_inputs(plain)))


def test_an_unknown_method_is_refused(applied):
    model = build("uniform 1", layers=1)
    layer = model.mtp.layers[0]
    layer.config = copy.copy(layer.config)
    layer.config.recompute_method = "every other"
    with pytest.raises(ValueError, match="recompute"):
        output_of(layer, layer_inputs(model))
