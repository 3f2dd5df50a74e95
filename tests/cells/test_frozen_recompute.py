"""frozen-recompute: adapters behind frozen embeddings are trained under full recompute, to the bit as without it."""

import pytest
import torch
from recompute_cases import share_storage_in_python

import shim
from shim import testing
from shim.testing import Layout

ID = "frozen-recompute"
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
METHODS = [UNIFORM, {**UNIFORM, "recompute_num_layers": 2}, {**UNIFORM, "recompute_method": "block"}]


@pytest.fixture(autouse=True)
def one_rank():
    with testing.layout_initialised(Layout()):
        yield


def row():
    return testing.pack(testing.random_sequences((5, 7, 4)), align=4)


def adapted(**options):
    model = testing.build_gpt(mtp_num_layers=None, **options)
    testing.add_lora(model)
    return model


def equal_bits(a, b):
    same = a.grads.keys() == b.grads.keys() and all(torch.equal(a.grads[name], b.grads[name]) for name in a.grads)
    return same and torch.equal(a.main, b.main)


def test_stock_trains_no_adapter():
    """No output of the decoder requires a gradient, so there is nothing to run backward from."""
    with pytest.raises(RuntimeError, match="does not require grad"):
        testing.run_packed(adapted(**UNIFORM), row())


@pytest.mark.parametrize("method", METHODS, ids=["1", "2", "block"])
def test_adapters_get_the_same_gradients_as_without_recompute(method):
    """All of them, in every chunk and layer, bit for bit."""
    plain = testing.run_packed(adapted(), row())
    with shim.patched(only=[ID], require=[ID]):
        assert equal_bits(testing.run_packed(adapted(**method), row()), plain)
    assert len(plain.grads) == 16


def test_layers_are_recomputed_all_the_same():
    with shim.patched(only=[ID], require=[ID]):
        model, calls = adapted(**UNIFORM), []
        model.decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        testing.run_packed(model, row())
    assert calls == [False, True]


def hidden_states_of(model):
    given = row()
    inputs = {"input_ids": given.input_ids, "position_ids": given.position_ids, "attention_mask": None}
    return model(**inputs, packed_seq_params=given.packed_seq_params())


def test_a_block_with_nothing_to_train_keeps_no_graph():
    """As stock has it: frozen layers cost neither memory nor a backward pass."""
    model = testing.build_gpt(mtp_num_layers=None, **UNIFORM).requires_grad_(False)
    with shim.patched(only=[ID], require=[ID]):
        assert not hidden_states_of(model).requires_grad


def test_states_that_require_a_gradient_already_are_handed_on():
    """The gradient of what comes before the block does not stop in front of it."""
    model = adapted(**UNIFORM)
    model.embedding.word_embeddings.weight.requires_grad_(True)
    plain = adapted()
    plain.embedding.word_embeddings.weight.requires_grad_(True)
    with shim.patched(only=[ID], require=[ID]):
        assert equal_bits(testing.run_packed(model, row()), testing.run_packed(plain, row()))


NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
# From 0.13 stock needs Transformer Engine or the other patch for it.
WITH_NORMS = [ID, "fp8-fp4-recompute"]


@pytest.fixture
def share_storage_is_python(monkeypatch):
    share_storage_in_python(monkeypatch)


def test_adapters_behind_recomputed_norms_get_the_same_gradients(share_storage_is_python):
    plain = testing.run_packed(adapted(), row())
    with shim.patched(only=WITH_NORMS[1:]), pytest.raises(TypeError, match="missing 1 required"):
        testing.run_packed(adapted(**NORMS), row())
    with shim.patched(only=WITH_NORMS, require=WITH_NORMS):
        assert equal_bits(testing.run_packed(adapted(**NORMS), row()), plain)
        model = testing.build_gpt(mtp_num_layers=None, **NORMS).requires_grad_(False)
        assert not hidden_states_of(model).requires_grad
    assert len(plain.grads) == 16
