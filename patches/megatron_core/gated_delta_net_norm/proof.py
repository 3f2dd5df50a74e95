"""Proof of gated-delta-net-norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_features import need_option
from shim.patches.megatron_core._proof_layers import train_layer
from shim.testing import Layout
from shim.testing.proof import CannotRunError, Here, proof

TOKENS, BATCH, HIDDEN = 8, 2, 16
KEY_HEADS, VALUE_HEADS, HEAD = 2, 4, 8
STEPS, LR = 3, 0.05
Q, V = KEY_HEADS * HEAD, VALUE_HEADS * HEAD
# How a rank's rows of a weight are made up: of a part of each of these sections.
SECTIONS = {"in_proj.weight": [Q, Q, V, V, VALUE_HEADS, VALUE_HEADS], "conv1d.weight": [Q, Q, V]}
SHARDED = {"in_proj.weight": 0, "conv1d.weight": 0, "dt_bias": 0, "A_log": 0, "out_proj.weight": 1}


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """As flash-linear-attention's kernel, which needs a GPU: x over its length along the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


@contextlib.contextmanager
def without_kernels() -> Iterator[Any]:
    """The module of gated delta net, in eager mode, with the one kernel stood in that it takes when deterministic."""
    name = "megatron.core.ssm.gated_delta_net"
    need_option("linear_conv_kernel_dim", "gated delta net")
    if find_spec("megatron.core.ssm") is None or find_spec(name) is None:
        raise CannotRunError("gated delta net of this release is in another module")
    module = import_module(name)
    inside = import_module(f"{name}.common") if hasattr(module, "__path__") else module
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(inside, "HAVE_FLA", True))
        undo.enter_context(mock.patch.object(inside, "l2norm", l2norm, create=True))
        eager = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else None
        undo.enter_context(eager or contextlib.nullcontext())
        yield module


def build(module: Any, **overrides: Any) -> Any:
    """A layer for this tensor-parallel size, with (its part of) the same weights for every size."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        add_bias_linear=False,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        deterministic_mode=True,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=groups.tp.size(),
        **overrides,
    )
    parts = module.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    layer = module.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
    generator = torch.Generator().manual_seed(0)
    size, rank = groups.tp.size(), groups.tp.rank()
    with torch.no_grad():
        for name, weight in sorted(layer.named_parameters()):
            dim, shape = SHARDED.get(name), list(weight.shape)
            if dim is None:
                weight.copy_(1 + 0.2 * torch.randn(shape, generator=generator))
                continue
            shape[dim] *= size
            whole = torch.randn(shape, generator=generator) * 0.3
            sections = whole.split(SECTIONS.get(name, shape[dim]), dim)
            weight.copy_(torch.cat([section.chunk(size, dim)[rank] for section in sections], dim))
    return layer


def trained(overrides: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The weight of the output norm, [v], on this rank: before, and after some steps of SGD."""
    with without_kernels() as module:
        layer = build(module, **overrides)
        before = layer.out_norm.weight.detach().clone()
        train_layer(layer, (TOKENS, BATCH, HIDDEN), steps=STEPS, rate=LR)
        return before, layer.out_norm.weight.detach().clone()


def error(here: Here, **overrides: Any) -> float:
    """How far the weight of any rank has moved elsewhere than on one rank, over how far it has moved there."""
    ((before, expected),) = here.run(trained, {})
    ranks = here.run(trained, overrides, layout=Layout(tp=here.world))
    return max(float((found - expected).norm() / (expected - before).norm()) for _, found in ranks)


@proof("weight of the norm off by {:.1e}", bound=1e-4, ranks=2)
def the_output_norm_trains_alike_on_all_ranks(here: Here) -> float:
    """The output norm of gated delta net trains wrongly under tensor parallelism without sequence parallelism.

    To reproduce: on two tensor-parallel ranks wrap a GatedDeltaNet in DistributedDataParallel, with
    `sequence_parallel=False`. Run forward, backward, finalize_model_grads and a step of SGD, some times. Compare
    `out_norm.weight` between the ranks, and with that of one rank that has all heads.

    Every rank norms its own heads with the one weight [v], so the gradient is the sum over ranks. Under sequence
    parallelism the weight carries the mark sequence_parallel, and _allreduce_non_tensor_model_parallel_grads sums it.
    Without sequence parallelism only q_layernorm and k_layernorm are summed. Each rank steps by the part of its own
    heads, and the copies of the weight drift apart.

    Right is what one rank trains. From 0.16 on.

    The kernels of flash-linear-attention are stood in: the layer runs in deterministic mode, with an l2norm in torch.
    """
    return error(here)
