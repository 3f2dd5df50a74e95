"""Proof of mla-fused-down-projection."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_layers import largest_error
from shim.testing import CPUCoreAttention, Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

MLA = "megatron.core.transformer.multi_latent_attention"
TOKENS, BATCH, HIDDEN, HEADS = 8, 2, 16, 4
QUERY, KEY_VALUE, ROTARY, HEAD = 8, 8, 4, 4


def build(sequence_parallel: bool = False) -> Any:
    """The layer for this tensor-parallel size, with (its part of) the same weights for every size."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    module: Any = import_module(MLA)
    if not hasattr(module, "FusedMLASelfAttention"):
        raise CannotRunError("this release has no fused down-projection")
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        multi_latent_attention=True,
        q_lora_rank=QUERY,
        kv_lora_rank=KEY_VALUE,
        qk_head_dim=HEAD,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=HEAD,
        rope_type="rope",
        add_bias_linear=False,
        **ON_CPU,
        apply_rope_fusion=False,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    spec.module = module.FusedMLASelfAttention
    spec.submodules.core_attention = CPUCoreAttention
    spec.submodules.linear_qkv_down_proj = ColumnParallelLinear
    layer = build_module(spec, config=config, layer_number=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(layer.named_parameters()):
            dim, shape = sharded_dim(name), list(weight.shape)
            shape[dim] *= size
            weight.copy_(part(name, torch.randn(shape, generator=generator) * 0.3, size, rank))
    return layer


def sharded_dim(name: str) -> int:
    """Along which dimension ranks have parts of a weight."""
    return 1 if "linear_proj" in name else 0


def part(name: str, whole: Tensor, size: int, rank: int) -> Tensor:
    """A rank's part of a weight: of the fused projection, a part of each of the two that it fuses."""
    sections = [QUERY, KEY_VALUE + ROTARY] if "linear_qkv_down_proj" in name else [whole.shape[sharded_dim(name)]]
    pieces = whole.split(sections, sharded_dim(name))
    return torch.cat([piece.chunk(size, sharded_dim(name))[rank] for piece in pieces], sharded_dim(name))


def trained(sequence_parallel: bool = False) -> dict[str, Tensor]:
    """Of one forward and backward pass: the output [s, b, h], and the gradients of hidden states and weights."""
    from megatron.core import parallel_state

    layer = build(sequence_parallel)
    generator = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(TOKENS, BATCH, HIDDEN, generator=generator) for _ in "hw")
    if sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        hidden, weights = (whole.chunk(size)[rank] for whole in (hidden, weights))
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden, None)[0]
    (output * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    assert hidden.grad is not None
    return {"output": output.detach(), "hidden": hidden.grad, **gradients}


def trained_twice() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Without and with sequence parallelism."""
    return trained(), trained(sequence_parallel=True)


def error(here: Here) -> float:
    """The largest relative error of any rank's output and gradients against those of one rank."""
    (expected,) = here.run(trained)

    def right(name: str, rank: int, shares: int) -> Tensor:
        if "weight" in name:
            return part(name, expected[name], here.world, rank)
        return expected[name].chunk(shares)[rank % shares]

    errors = [
        largest_error(found, functools.partial(right, rank=rank, shares=shares))
        for rank, results in enumerate(here.run(trained_twice, layout=Layout(tp=here.world)))
        for found, shares in zip(results, (1, here.world), strict=True)
    ]
    return float(torch.tensor(errors).max())


@proof(
    "output and gradients off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: split_with_sizes expects split_sizes to sum exactly to",
    beside=("mla-rope-key-gradient",),
)
def a_fused_projection_is_that_of_one_rank(here: Here) -> float:
    """The fused down-projection of multi-latent attention crashes under tensor parallelism.

    To reproduce: on two tensor-parallel ranks run a FusedMLASelfAttention (`mla_down_proj_fusion=True`) whose
    linear_qkv_down_proj is column-parallel, as Transformer Engine's layer spec has it. Here it is megatron-core's own
    ColumnParallelLinear.

    _qkv_down_projection splits a rank's columns at the sizes of the whole projection: a RuntimeError. Right is what one
    rank computes. In 0.17 and 0.18; 0.19 splits at the sizes of the parts, by pull request 5383. The gradient of the
    rotary key, which is wrong on its own, is fixed on both sides of this proof.
    """
    return error(here)
