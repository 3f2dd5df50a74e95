"""hybrid-frozen-norms: adapters get the gradients of no recompute, and states require one only if stock raises."""

import pytest
import torch
from nothing_saved import raises_nothing_saved

import shim
from shim.patches.megatron_core._proof_recompute import NORMS
from shim.patches.megatron_core.hybrid_frozen_norms import _recomputes_first_norm
from shim.patches.megatron_core.hybrid_frozen_norms.proof import adapted_hybrid, gradients, unequal

CELLS = {"0.13.1": "all"}

ID = "hybrid-frozen-norms"
# Stock needs Transformer Engine or the other patch for the recompute.
BOTH = [ID, "fp8-fp4-recompute"]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not shim.plan()[ID].wanted, reason="only a spec of one's own has such norms"),
]


def stack_without_norms(part):
    """As upstream's specs have them: a first layer that recomputes no norm, with or without adapters."""
    model = adapted_hybrid(part, **NORMS)
    model.decoder.layers[0].recompute_input_layernorm = False
    return model


@pytest.mark.parametrize("part", ["", "self_attention", "mlp", "layers.1.", "layers.2."])
def test_adapters_get_the_same_gradients_as_without_recompute(part):
    right = gradients(adapted_hybrid(part))
    with shim.patched(only=BOTH[1:]), raises_nothing_saved():
        gradients(adapted_hybrid(part, **NORMS))
    with shim.patched(only=BOTH, require=BOTH):
        assert unequal(gradients(adapted_hybrid(part, **NORMS)), right) == 0
        behind = stack_without_norms(part)
        assert unequal(gradients(behind), right) == 0
        assert shim.check(behind)[ID].state == "applied"
    assert len(right) in (4, 8, 16)


@pytest.mark.parametrize("part", ["", "layers.0."])
def test_behind_adapters_without_such_a_norm_stock_is_right_and_nothing_changes(part):
    """The embeddings get no gradient, which would cost a backward pass of the first layer."""
    model, required = stack_without_norms(part), []
    model.decoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: required.append(kwargs["hidden_states"].requires_grad), with_kwargs=True
    )
    for patches in (BOTH[1:], BOTH):
        with shim.patched(only=patches, require=patches):
            model.zero_grad()
            assert unequal(gradients(model), gradients(adapted_hybrid(part))) == 0
    assert required == [False, False]


@pytest.mark.parametrize("options", [{}, FULL, {**NORMS, "recompute_modules": ["core_attn"]}])
def test_without_recompute_of_norms_it_does_nothing(options):
    assert not _recomputes_first_norm(adapted_hybrid(**options).decoder)


def test_frozen_stacks_keep_no_graph_and_trained_embeddings_their_gradient():
    row = torch.arange(8)[None]
    with shim.patched(only=BOTH, require=BOTH):
        frozen = adapted_hybrid("nothing", **NORMS)
        assert not frozen(row, row, None).requires_grad
        trained = adapted_hybrid(**NORMS)
        trained.embedding.word_embeddings.weight.requires_grad_(True)
        assert "embedding.word_embeddings.weight" in gradients(trained)
