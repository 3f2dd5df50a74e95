"""The loss of each token from hidden states and the weights of output layers, for fused-linear-logprob.

`losses_of` has what ColumnParallelLinear does around its product: the sum of the gradient over the ranks, the gather of
sequence-parallel shards, and the sum in `main_grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shim import ops  # loads what is used, at its first use
from shim.ops._checks import is_plain

__all__ = ["NO_TARGET", "Head", "head_of", "losses_of"]

NO_TARGET = -100


class Head:
    """A layer at one call: its weight, [V / TP, h], and its hidden states, [s, b, h] or [s / TP, b, h]."""

    def __init__(self, layer: Any, weight: Tensor, hidden: Tensor) -> None:
        self.layer, self.weight, self.hidden = layer, weight, hidden

    @property
    def group(self) -> Any:
        group = getattr(self.layer, "tp_group", None)  # from 0.13
        if group is None:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
        return group

    @property
    def shape(self) -> torch.Size:
        """Of the logits, [s, b, V / TP]."""
        shards = self.group.size() if self.layer.sequence_parallel else 1
        return torch.Size((self.hidden.size(0) * shards, self.hidden.size(1), self.weight.size(0)))

    def logits(self) -> Tensor:
        made: Tensor = self.layer.forward(self.hidden, weight=self.weight)[0]
        return made

    @contextlib.contextmanager
    def states(self, chosen: Tensor | None = None) -> Iterator[Tensor]:
        """The hidden states of the whole sequence, [s, b, h]; with `chosen`, of these tokens of [s, b] alone, [n, h].

        Autograd keeps this rank's shard alone, as stock does, and gathers it again in backward.
        """
        if not self.layer.sequence_parallel:
            yield _chosen_of(self.hidden, chosen)
            return
        from megatron.core.tensor_parallel import mappings

        def gather(shard: Tensor) -> Tensor:
            return _chosen_of(mappings.gather_from_sequence_parallel_region(shard, group=self.group), chosen)

        whole, shard = gather(self.hidden), self.hidden.detach()
        place, shape = whole.data_ptr(), whole.shape

        def pack(kept: Tensor) -> Tensor | None:
            return None if (kept.data_ptr(), kept.shape) == (place, shape) else kept

        def unpack(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            with torch.no_grad():
                return gather(shard)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield whole


def losses_of(
    terms: list[tuple[Head, float]], labels: Tensor, skip: bool, predicts: bool
) -> tuple[Tensor, ops.Largest | None]:
    """The loss of each token, [b, s] in fp32, for labels [b, s] and logits that are the sum of one or two terms.

    A term is what a head makes, times a factor. A negative label means no target: the loss and its gradient are zero.
    skip: such tokens are left out before the product, so the host waits once for their number.
    predicts: with the largest logit of each token, [s, b], and its column in this rank's share; 0 without a target.
    """
    (head, scale), *others = sorted(terms, key=lambda term: -term[0].weight.size(1))
    target = labels.transpose(0, 1)
    target = target.masked_fill(target < 0, NO_TARGET)
    # In a CUDA graph the host cannot wait.
    chosen = (target != NO_TARGET).flatten().nonzero().squeeze(1) if skip and not _capturing(target) else None
    group = head.group
    with head.states(chosen) as hidden:
        weight, into = _with_main_grad(head.layer, head.weight)
        of_chosen = target if chosen is None else target.flatten()[chosen]
        largest = ops.Largest.like(of_chosen, torch.promote_types(hidden.dtype, torch.float32)) if predicts else None
        found = ops.linear_token_logprobs(
            hidden,
            weight,
            of_chosen,
            tp_group=group if group.size() > 1 else None,
            temperature=1.0 / scale,
            ignore_index=NO_TARGET,
            sum_hidden_grad=bool(head.layer.allreduce_dgrad),
            weight_grad=into,
            low_rank=_low_rank_of(*others[0], scale, chosen) if others else None,
            largest=largest,
        )
    logprob = _at(chosen, found.logprob, target)
    if largest is not None:
        value = (largest.value * scale).to(head.hidden.dtype)
        largest = ops.Largest(_at(chosen, value, target), _at(chosen, largest.column, target))
    return -logprob.float().transpose(0, 1).contiguous(), largest


def _at(chosen: Tensor | None, of_chosen: Tensor, target: Tensor) -> Tensor:
    """[s, b], with zeros at all other tokens of [s, b] than these."""
    if chosen is None:
        return of_chosen
    return of_chosen.new_zeros(target.numel()).index_copy(0, chosen, of_chosen).view(target.shape)


def _low_rank_of(head: Head, factor: float, scale: float, chosen: Tensor | None) -> ops.LowRank:
    """The second term, beside a first one that is multiplied by `scale`."""
    with head.states(chosen) as hidden:
        hidden = hidden if factor == scale else hidden * (factor / scale)
        return ops.LowRank(hidden, *_with_main_grad(head.layer, head.weight), bool(head.layer.allreduce_dgrad))


def head_of(layer: Any, hidden: Any, weight: Any, gather: Any) -> Head | str:
    """The head for one call of a layer without an obstacle, or why the layer itself has to run, in words."""
    weight = layer.weight if weight is None else weight
    if not (is_plain(weight) or type(weight) is torch.nn.Parameter) or not is_plain(hidden):
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


def _chosen_of(hidden: Tensor, chosen: Tensor | None) -> Tensor:
    return hidden if chosen is None else hidden.flatten(0, 1).index_select(0, chosen)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _ToMainGrad(torch.autograd.Function):
    """The weight, for an operation that adds the gradient to main_grad by itself and returns none."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        ctx.weight, ctx.main_grad = weight, weight.main_grad
        ctx.set_materialize_grads(False)
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        weight.main_grad = ctx.main_grad
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # What the hook of DDP finds as the gradient. It adds it only where zero_out_wgrad says that it is zero.
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _with_main_grad(layer: Any, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight, and what its gradient is to be added to, as with gradient_accumulation_fusion."""
    if not (layer.gradient_accumulation_fusion and weight.requires_grad and hasattr(weight, "main_grad")):
        return weight, None
    found: Tensor = _ToMainGrad.apply(weight)
    return found, weight.main_grad
