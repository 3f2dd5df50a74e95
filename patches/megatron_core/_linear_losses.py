"""The loss of each token from hidden states and the weight of an output layer, for fused-linear-logprob.

`obstacle_of` says which layers this cannot take the place of. `losses` has what ColumnParallelLinear does around its
product: the sum of the gradient over the ranks, the gather of sequence-parallel shards, and the sum in `main_grad`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shim.ops.logprob import linear_token_logprobs

__all__ = ["Head", "head_of", "obstacle_of"]

NO_TARGET = -100
TILE_CPU, TILE_DEVICE = 16 << 20, 256 << 20  # bytes of logits
# Layers whose forward is a product with the weight. The second (dev) has a loss of its own besides.
PLAIN = {
    "megatron.core.tensor_parallel.layers": "ColumnParallelLinear",
    "megatron.core.transformer.linear_cross_entropy": "LinearCrossEntropyModule",
}


def obstacle_of(layer: Any) -> str | None:
    """Why the losses cannot be made from this output layer's weight, in words; None if they can."""
    known = [getattr(sys.modules.get(module), name, None) for module, name in PLAIN.items()]
    if type(layer) not in known or "forward" in vars(layer):
        return f"the output layer is a {type(layer).__name__} with a forward of its own"
    if layer._modules:
        return f"the output layer has a module of its own: {', '.join(layer._modules)}"
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "hooks on the output layer want its logits, or their gradient"
    if layer.bias is not None:
        return "the output layer has a bias"
    if layer.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute needs the gradient of the logits"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "the weight of the output layer is in shards (GTP)"
    if layer.explicit_expert_comm:
        return "the output layer belongs to an expert"
    return None


class Head:
    """The output layer at one call: its weight, [V / TP, h], and its hidden states, [s, b, h] or [s / TP, b, h]."""

    def __init__(self, layer: Any, weight: Tensor, hidden: Tensor) -> None:
        self.layer, self.weight, self.hidden = layer, weight, hidden

    @property
    def group(self) -> Any:
        group = getattr(self.layer, "tp_group", None)  # from 0.13
        if group is None:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
        return group

    def losses(self, labels: Tensor, scale: float) -> Tensor:
        """The loss of each token, [b, s] in fp32, for labels [b, s]. `scale` multiplies the logits.

        A negative label means no target: the loss and its gradient are zero.
        """
        target = labels.transpose(0, 1)
        target = target.masked_fill(target < 0, NO_TARGET)
        weight = _to_main_grad(self.layer, self.weight)
        group = self.group
        ranks = group.size()
        with self.gathered(group) as hidden:
            found = linear_token_logprobs(
                hidden,
                weight,
                target,
                tp_group=group if ranks > 1 else None,
                temperature=1.0 / scale,
                ignore_index=NO_TARGET,
                sum_hidden_grad=bool(self.layer.allreduce_dgrad),
            )
        return -found.logprob.float().transpose(0, 1).contiguous()

    @contextlib.contextmanager
    def gathered(self, group: Any) -> Iterator[Tensor]:
        """The hidden states of the whole sequence, [s, b, h].

        Autograd keeps this rank's shard alone, as stock does, and gathers it again in backward.
        """
        if not self.layer.sequence_parallel:
            yield self.hidden
            return
        from megatron.core.tensor_parallel import mappings

        whole = mappings.gather_from_sequence_parallel_region(self.hidden, group=group)
        place, shape, shard = whole.data_ptr(), whole.shape, self.hidden.detach()

        def pack(kept: Tensor) -> Tensor | None:
            return None if (kept.data_ptr(), kept.shape) == (place, shape) else kept

        def unpack(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            with torch.no_grad():
                again: Tensor = mappings.gather_from_sequence_parallel_region(shard, group=group)
            return again

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield whole

    @torch.no_grad()
    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Some tokens of the sequence, as a slice, with their logits, [n, b, V / TP]. Without gradient."""
        with self.gathered(self.group) as hidden:
            row_bytes = hidden.size(1) * self.weight.size(0) * hidden.element_size()
            rows = max(1, (TILE_CPU if hidden.device.type == "cpu" else TILE_DEVICE) // max(row_bytes, 1))
            for start in range(0, hidden.size(0), rows):
                tokens = slice(start, start + rows)
                yield tokens, hidden[tokens] @ self.weight.t()


def head_of(layer: Any, hidden: Any, weight: Any, gather: Any) -> Head | str:
    """The head for one call of a layer without an obstacle, or why the layer itself has to run, in words."""
    weight = layer.weight if weight is None else weight
    if type(weight) not in (Tensor, torch.nn.Parameter) or type(hidden) is not Tensor:
        return f"the weight is a {type(weight).__name__}, and the hidden states are a {type(hidden).__name__}"
    right = weight.shape == (layer.output_size_per_partition, layer.input_size)
    if not right or hidden.dim() != 3 or hidden.size(-1) != layer.input_size:
        return "the shapes do not fit"
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return "autocast is on"
    if hidden.dtype != weight.dtype:
        return f"the weight is in {weight.dtype}, and the hidden states are in {hidden.dtype}"
    if getattr(layer, "output_dtype", None) not in (None, hidden.dtype):
        return f"the logits are to be in {layer.output_dtype}"
    if layer.gradient_accumulation_fusion and hasattr(weight, "__fsdp_param__"):
        return "Megatron-FSDP makes the gradient of the weight"
    head = Head(layer, weight, hidden)
    gathers = layer.gather_output if gather is None else gather
    return "the logits are gathered" if gathers and head.group.size() > 1 else head


class _ToMainGrad(torch.autograd.Function):
    """The weight, whose gradient goes into main_grad as with gradient_accumulation_fusion."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        ctx.weight, ctx.main_grad = weight, weight.main_grad
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:  # type: ignore[override]
        weight = ctx.weight
        weight.main_grad = ctx.main_grad
        ctx.main_grad.add_(grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # What the hook of DDP finds as the gradient. It adds it only where zero_out_wgrad says that it is zero.
        weight.grad_added_to_main_grad = True
        return grad.zero_()


def _to_main_grad(layer: Any, weight: Tensor) -> Tensor:
    if not (layer.gradient_accumulation_fusion and weight.requires_grad and hasattr(weight, "main_grad")):
        return weight
    found: Tensor = _ToMainGrad.apply(weight)
    return found
