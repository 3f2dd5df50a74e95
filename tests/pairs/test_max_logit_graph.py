"""max-logit-graph: the maximum of attention logits has stock's values, and no graph."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.max_logit_graph.proof import BATCH, HEAD, HEADS, TOKENS, attend, attention

CELLS = {"0.16.1+2.12.0": "all"}

ID = "max-logit-graph"
pytestmark = needed(ID)


@pytest.fixture(autouse=True)
def one_rank():
    with testing.layout_initialised(testing.Layout()):
        yield


def step(layer, seed):
    query = torch.randn(TOKENS, BATCH, HEADS, HEAD, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    output = attend(layer, query)
    output.square().sum().backward()
    return output.detach(), query.grad, layer.current_max_attn_logits


def test_values_and_gradients_are_those_of_stock():
    layer = attention()
    stock = [step(layer, seed) for seed in range(3)]
    assert stock[-1][-1].requires_grad
    with shim.patched(only=[ID], require=[ID]):
        layer = attention()
        found = [step(layer, seed) for seed in range(3)]
    for mine, expected in zip(found, stock, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
        assert not mine[-1].requires_grad


def test_without_a_logged_maximum_nothing_happens():
    """The layer has no such attribute then, and gets none."""
    with shim.patched(only=[ID], require=[ID]):
        layer = attention()
        layer.config.log_max_attention_logit = False
        del layer.current_max_attn_logits
        parent = type(layer).__mro__[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parent, "forward", lambda self, query, *_, **__: query)
            query = torch.randn(TOKENS, BATCH, HEADS, HEAD, requires_grad=True)
            assert layer(query, query, query, None, AttnMaskType.causal) is query
        assert not hasattr(layer, "current_max_attn_logits")
