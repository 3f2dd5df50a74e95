"""Proof of heterogeneous-linear-sp."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shim.testing import Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import Here, LacksFeatureError, proof

TOKENS, WIDTH, RANKS = 8, 16, 2


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(sequence_parallel: bool) -> tuple[Any, Tensor]:
    """The layer of this rank, and the weight of all ranks."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
    except ImportError:
        raise LacksFeatureError("this release has no heterogeneous models") from None
    size = dist.get_world_size()
    options = {"tensor_model_parallel_size": size, "sequence_parallel": sequence_parallel, "add_bias_linear": False}
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=2, **options, **ON_CPU)
    layer: Any = ColumnParallelLinearGathered(config, tp_comm_buffer_name="linear_mlp")
    weight = _random(WIDTH, WIDTH, seed=0)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(size)[dist.get_rank()])
    return layer, weight


def off_by(sequence_parallel: bool = True) -> float:
    """How far a layer with a residual is from that of one rank, in output and gradients, in parts of them."""
    layer, weight = linear(sequence_parallel)
    whole, gradient = _random(TOKENS, 1, WIDTH, seed=1), _random(TOKENS, 1, WIDTH, seed=2)

    def own(given: Tensor) -> Tensor:
        return given.chunk(dist.get_world_size())[dist.get_rank()] if sequence_parallel else given

    states = own(whole).clone().requires_grad_()
    output, _ = layer(states)
    (states + output).backward(own(gradient))
    assert states.grad is not None
    of_weight = torch.einsum("sbo,sbi->oi", gradient, whole).chunk(dist.get_world_size())[dist.get_rank()]
    pairs = (
        (output, own(whole @ weight.T)),
        (states.grad, own(gradient + gradient @ weight)),
        (layer.weight.grad, of_weight),
    )
    return max(float((found - right).norm() / right.norm()) for found, right in pairs)


@proof(
    "output or gradients off by {:.1e}",
    bound=1e-6,
    ranks=RANKS,
    defect="crash",
    crashes=r"RuntimeError: The size of tensor a .* must match the size of tensor b",
)
def a_linear_layer_gives_each_rank_its_tokens(here: Here) -> float:
    """Under sequence parallelism a linear layer in the place of attention or of an MLP has an output of a wrong shape.

    To reproduce: build a heterogeneous GPTModel with `replace_with_linear` in one of its blocks, and train it with two
    tensor-parallel ranks and `sequence_parallel=True`. Or add the input of a `ColumnParallelLinearGathered` to its
    output, as here.

    `_gather_from_tensor_parallel_region` pads [s, b, h / tp] by `[0] * 4 + [before, after]`. torch counts dimensions
    from the last, so that zeros come before and behind the tokens. Right is the output of one rank. From 0.12 to 0.20.
    """
    return float(max(here.run(off_by, layout=Layout(tp=RANKS, sequence_parallel=True))))
