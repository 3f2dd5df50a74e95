"""Proof of affine-projector-bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.testing import Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import Here, proof

INPUT, HIDDEN = 8, 32


def projector(bias: bool = True) -> Any:
    """The part of this tensor-parallel rank of an affine projection, filled by the place of each output."""
    from megatron.core import parallel_state
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLPSubmodules

    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    options = {**ON_CPU, "add_bias_linear": bias, "tensor_model_parallel_size": size}
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, **options)
    model: Any = MultimodalProjector(config, MLPSubmodules(ColumnParallelLinear, None), "affine", INPUT)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            whole = torch.randn(HIDDEN, *weight.shape[1:], generator=generator)
            weight.copy_(whole.chunk(size)[rank])
    return model


def step(bias: bool = True) -> tuple[Tensor, Tensor]:
    """The output, and the gradients of all parameters of all ranks."""
    from megatron.core import parallel_state

    model = projector(bias)
    output = model(torch.randn(3, 1, INPUT, generator=torch.Generator().manual_seed(1)))
    output.square().sum().backward()
    parts = []
    for weight in model.parameters():
        both = [torch.empty_like(weight) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(both, weight.grad, group=parallel_state.get_tensor_model_parallel_group())
        parts.append(torch.cat(both).flatten())
    return output.detach(), torch.cat(parts)


@proof(
    "output and gradients off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: The size of tensor a \(32\) must match the size of tensor b \(16\)",
)
def an_affine_projection_is_that_of_one_rank(here: Here) -> float:
    """The affine MultimodalProjector with a bias raises under tensor parallelism.

    To reproduce: on two ranks with `tensor_model_parallel_size=2`, build a MultimodalProjector of the type "affine"
    with `ColumnParallelLinear` and `add_bias_linear=True`, and call it.

    `gather_output=True` gathers the output, and `skip_bias_add=True` returns the bias of a rank. Right are the output
    and the gradients of one rank. From 0.12 to 0.19.
    """
    (truth,) = here.run(step)[:1]
    found = here.run(step, layout=Layout(tp=here.world))
    return max(
        float((value - right).norm() / right.norm())
        for of_rank in found
        for value, right in zip(of_rank, truth, strict=True)
    )
