"""frozen-expert-bias: a bias stays if its router is frozen, and moves as on stock if it is trained."""

from typing import Any

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.frozen_expert_bias.proof import MODEL, step

ID = "frozen-expert-bias"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")


@pytest.fixture(autouse=True)
def one_rank():
    with testing.layout_initialised(testing.Layout()), torch.compiler.set_stance("force_eager"):
        yield


def biases_after_a_step(train_first_router=True, **options: Any):
    """The bias of each of two routers after a step of LoRA. The second is frozen."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = testing.build_gpt(**{**MODEL, "num_layers": 2, **options})
    testing.add_lora(model)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    routers[0].weight.requires_grad_(train_first_router)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    step(wrapped)
    assert all(not router.local_tokens_per_expert.any() for router in routers), "counts of a step begin at zero"
    return [router.expert_bias for router in routers]


@needed
def test_a_trained_router_moves_as_on_stock():
    """As one that modules_to_save names."""
    with shim.patched(only=[ID], require=[ID]):
        trained, frozen = biases_after_a_step()
    stock = biases_after_a_step()
    assert trained.any() and stock[1].any()
    assert torch.equal(trained, stock[0])
    assert not frozen.any()
