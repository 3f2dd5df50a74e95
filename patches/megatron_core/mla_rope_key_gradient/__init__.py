"""The gradient of the rotary key of multi-latent attention under tensor parallelism.

What is wrong (0.12 to 0.20): all heads of multi-latent attention share one rotary part of the key. A tensor-parallel
rank has some of the heads, so its gradient for that part is a part of the sum. Nothing sums it:

| down projection of the key | without sequence parallelism | with it |
|---|---|---|
| column-parallel (local layers; TEColumnParallelLinear) | wrong | wrong |
| duplicated (TELinear, from 0.14) | wrong, and the copies of the weight drift apart | right |

A column-parallel projection is gathered, and in backward each rank takes its columns of its local gradient. A
duplicated one trains on the rank's own gradient. With sequence parallelism the rotary part of a duplicated one is
gathered over ranks, whose backward sums. Everything before the projection also gets the wrong gradient: the hidden
states, and so all layers below, even if attention itself is frozen.

The patch sums the gradient over tensor-parallel ranks if stock does not: one all-reduce of [s, b, rotary head
size] for each layer and microbatch, in backward, which is what upstream does for any input that ranks share. It does
so before the key is rotated, with the fused and the unfused function, and in the recompute of mla_up_proj. Nothing
happens on one rank, for a duplicated projection with sequence parallelism, and if nothing below needs a gradient.

Not covered: AbsorbedMLASelfAttention (from 0.17) with a column-parallel projection, which no spec of a release has.
Copies of a weight that have drifted apart stay apart until a checkpoint is loaded, which has that of the first rank.

Upstream: Megatron-LM pull request 6839 (open). It leaves out sequence parallelism, with which a column-parallel
projection needs the sum as well.

Delete when: every supported release sums the gradient of the rotary key over tensor-parallel ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing

MLA = "megatron.core.transformer.multi_latent_attention:"
PREPARE = MLA + "MLASelfAttention.get_query_key_value_tensors"
GATHER = MLA + "gather_from_sequence_parallel_region"
FUSED = MLA + "fused_apply_mla_rope_for_kv"
FUSIONS = "megatron.core.fusions.fused_mla_yarn_rope_apply"
UNFUSED = "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"


class _Layer:
    """The layer of multi-latent attention that a thread makes queries and keys of.

    group: the ranks that have parts of the gradient of its rotary key; None once something else sums them.
    rotated: how many tensors the unfused function has rotated: first the query, then the key.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rotated = 0


_LAYER = Ambient(__name__)


class _SumGradient(torch.autograd.Function):
    """The input, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy, because a gradient may be shared with others.
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _get_query_key_value_tensors(original: Function) -> Function:
    @functools.wraps(original)
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = _tensor_parallel_group(self)
        if group.size() == 1:
            return original(self, *args, **kwargs)
        layer = _Layer(group)
        tensors = _LAYER.call(layer, original, self, *args, **kwargs)
        checkpoint = self.qkv_up_checkpoint
        if layer.group is not None and checkpoint is not None and checkpoint.run_function is not None:
            # Recomputed in backward, where this wrapper is not.
            checkpoint.run_function = functools.partial(_again, layer.group, checkpoint.run_function)
        return tensors

    return get_query_key_value_tensors


def _tensor_parallel_group(attention: Any) -> Any:
    groups = getattr(attention, "pg_collection", None) or getattr(attention, "model_comm_pgs", None)  # 0.13 to 0.15
    group = getattr(groups, "tp", None)
    if group is None:  # 0.12
        group = sys.modules["megatron.core.parallel_state"].get_tensor_model_parallel_group()
    return group


def _again(group: Any, function: Function, *args: Any) -> Any:
    return _LAYER.call(_Layer(group), function, *args)


def _gather_from_sequence_parallel_region(original: Function) -> Function:
    """Upstream calls it for the rotary key of a duplicated projection, and its backward sums."""

    @functools.wraps(original)
    def gather_from_sequence_parallel_region(*args: Any, **kwargs: Any) -> Any:
        if _LAYER.value is not None:
            _LAYER.value.group = None
        return original(*args, **kwargs)

    return gather_from_sequence_parallel_region


def _apply_rotary_pos_emb(original: Function) -> Function:
    tensor_of, with_tensor = argument(original, "t"), replacing(original, "t")

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        layer = _LAYER.value
        if layer is not None and layer.group is not None:
            layer.rotated += 1
            if layer.rotated == 2:
                shared = _SumGradient.apply(tensor_of(args, kwargs), layer.group)
                args, kwargs = with_tensor(args, kwargs, shared)
        return original(*args, **kwargs)

    return apply_rotary_pos_emb


def _fused_apply_mla_rope_for_kv(original: Any) -> Any:
    if original is None:  # the fused function cannot be imported
        return None
    upstreams = getattr(sys.modules.get(FUSIONS), "fused_apply_mla_rope_for_kv", None)
    key_of = argument(original, "k_pos_emb", like=upstreams)
    with_key = replacing(original, "k_pos_emb", like=upstreams)

    @functools.wraps(original)
    def fused_apply_mla_rope_for_kv(*args: Any, **kwargs: Any) -> Any:
        layer = _LAYER.value
        if layer is not None and layer.group is not None:
            shared = _SumGradient.apply(key_of(args, kwargs), layer.group)
            args, kwargs = with_key(args, kwargs, shared)
        return original(*args, **kwargs)

    return fused_apply_mla_rope_for_kv


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    if _tensor_parallel_group(module).size() == 1:
        return True  # nobody else has a part of the gradient
    weight = getattr(module.linear_kv_down_proj, "weight", None)
    whole = module.config.kv_lora_rank + module.config.qk_pos_emb_head_dim
    if module.config.sequence_parallel and weight is not None and weight.shape[0] == whole:
        return True  # the rotary part has to be gathered, and the backward of that sums
    return "shim does not try it, because the gradient is a sum over tensor-parallel ranks"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    found: dict[str, Callable[[Function], Function]] = {
        PREPARE: _get_query_key_value_tensors,
        GATHER: _gather_from_sequence_parallel_region,
        UNFUSED: _apply_rotary_pos_emb,
    }
    return found if variant == "v0_12" else {**found, FUSED: _fused_apply_mla_rope_for_kv}
