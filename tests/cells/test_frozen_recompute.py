"""frozen-recompute: adapters behind frozen embeddings are trained under full recompute, to the bit as without it."""

import contextlib
from importlib.util import find_spec

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from nothing_saved import raises_nothing_saved

import shim
from shim import testing
from shim.patches.megatron_core._proof_recompute import NORMS
from shim.patches.megatron_core.frozen_recompute.proof import UNIFORM, adapted, row

CELLS = {"0.12.3": "all"}

ID = "frozen-recompute"
METHODS = [UNIFORM, {**UNIFORM, "recompute_num_layers": 2}, {**UNIFORM, "recompute_method": "block"}]
pytestmark = pytest.mark.usefixtures("one_rank")


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


# From 0.13 stock needs Transformer Engine or the other patch for it.
WITH_NORMS = [ID, "fp8-fp4-recompute"]


def test_adapters_behind_recomputed_norms_get_the_same_gradients():
    plain = testing.run_packed(adapted(), row())
    with shim.patched(only=WITH_NORMS[1:]), raises_nothing_saved():
        testing.run_packed(adapted(**NORMS), row())
    with shim.patched(only=WITH_NORMS, require=WITH_NORMS):
        assert equal_bits(testing.run_packed(adapted(**NORMS), row()), plain)
        model = testing.build_gpt(mtp_num_layers=None, **NORMS).requires_grad_(False)
        assert not hidden_states_of(model).requires_grad
    assert len(plain.grads) == 16


# Hyper connections, from 0.20. A model gets them by a specification of its own.

needs_mhc = pytest.mark.skipif(
    find_spec("megatron.core.transformer.hyper_connection") is None, reason="this release has no hyper connections"
)
MHC = {"recompute_granularity": "selective", "recompute_modules": ["mhc"]}
MHC_METHODS = [MHC, {**MHC, "recompute_modules": ["mhc", "layernorm"]}, {**MHC, "mhc_recompute_layer_num": 1}]


@pytest.fixture
def hyper_connections(monkeypatch):
    """All layers that are built have hyper connections. They run as written, because to compile them takes a minute."""
    from megatron.core.transformer.hyper_connection import HyperConnectionModule
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    plain = gpt_layer_specs.get_gpt_layer_local_spec

    def with_them(*args, **kwargs):
        spec = plain(*args, **kwargs)
        spec.module = HyperConnectionTransformerLayer
        spec.submodules.self_attention_hyper_connection = HyperConnectionModule
        spec.submodules.mlp_hyper_connection = HyperConnectionModule
        return spec

    monkeypatch.setattr(gpt_layer_specs, "get_gpt_layer_local_spec", with_them)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: contextlib.nullcontext())
    with torch._dynamo.config.patch(disable=True):
        yield


def connected(trained=False, **options):
    model = adapted(enable_mhc_connections=True, **options)
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or (trained and "hyper_connection" in name))
    return model


@needs_mhc
@pytest.mark.parametrize("method", MHC_METHODS, ids=["mhc", "mhc and norms", "each layer"])
def test_adapters_behind_recomputed_hyper_connections_get_the_same_gradients(method, hyper_connections):
    plain = testing.run_packed(connected(), row())
    with shim.patched(only=WITH_NORMS[1:]), raises_nothing_saved():
        testing.run_packed(connected(**method), row())
    with shim.patched(only=WITH_NORMS, require=WITH_NORMS):
        model = connected(**method)
        assert equal_bits(testing.run_packed(model, row()), plain)
        assert shim.check(model)[ID].state == "applied"
    assert len(plain.grads) == 16


@needs_mhc
def test_behind_trained_hyper_connections_stock_is_right_and_nothing_changes(hyper_connections):
    """The embeddings get no gradient, which would cost a backward pass of the first connections."""
    plain, required = testing.run_packed(connected(trained=True), row()), []
    for patches in (WITH_NORMS[1:], WITH_NORMS):
        with shim.patched(only=patches, require=patches):
            model = connected(trained=True, **MHC)
            first = model.decoder.layers[0].self_attention_hyper_connection
            first.register_forward_pre_hook(lambda _, inputs: required.append(inputs[0].requires_grad))
            assert equal_bits(testing.run_packed(model, row()), plain)
    assert required == [False, False]


@needs_mhc
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_an_override_in_front_of_hyper_connections_is_judged_by_what_it_does(hyper_connections, trained):
    """One that hides the patch matters only where the connections are frozen."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    stock = TransformerBlock.forward

    class Own(TransformerBlock):
        def forward(self, *args, **kwargs):
            return stock(self, *args, **kwargs)

    with shim.patched(only=[ID]):
        model = connected(trained, **MHC)
        model.decoder.__class__ = Own
        found = shim.check(model)[ID]
    assert (found.state == "applied") == trained, str(found)
