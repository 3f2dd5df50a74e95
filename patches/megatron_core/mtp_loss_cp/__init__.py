"""The loss of multi-token prediction (MTP) under context parallelism (CP).

What is wrong (0.12 to 0.20): a rank of the CP group has a part of each row. It divides its MTP loss by its own count of
targets, and gradients are averaged over the group. So a target counts more on a rank that has few of them, and the
gradient of MTP is not that of one rank. The main loss is divided by the count of the whole row. If only the last 10 of
32 tokens are targets, as in supervised fine-tuning, the gradient of MTP is off by 0.38 on two ranks. The logged loss is
wrong with it. With calculate_per_token_loss the gradient is wrong from 0.17 on, which multiply by the rank's count
before the roll.
- On a rank without targets 0.12 to 0.16 divide zero by zero, and all gradients are NaN. Later releases, and
  mtp-packed-sequences alone, take that rank's loss for zero in the mean over ranks. That is finite, and too small.
- 0.12 and 0.13 also roll unpacked rows inside a rank, so that the targets themselves are wrong.

The patch divides by the count of the whole row. It rolls the loss masks of all depths before the first loss, and sums
their counts over the group. When upstream rolls a mask, it gets the one that was rolled, and the count of the row over
the number of ranks, because gradients and logs are averaged over ranks. From 0.17 on upstream divides by one target at
least. There it gets the count of the row, and a mask that is multiplied by the number of ranks. On 0.12 and 0.13
unpacked rows are rolled over ranks, as on 0.14. A row without any target has a loss of zero and no gradient of MTP.

A microbatch costs one all_reduce of 1 + mtp_num_layers numbers over the CP group, and no wait of the host. Only the
rolls of 0.12 and 0.13 send other messages than stock's. On one CP rank nothing happens.

The group is the packed row's own (dynamic CP), else the model's; on 0.12 and 0.13 that of parallel_state.

slime's and miles' trees compute this loss from tokens, which they get in `mtp_kwargs` and move once more, as the mask.

Padding of packed rows, and packed rows before 0.16, need mtp-packed-sequences. Each works without the other.

Not covered:
- A trainer's function that takes the place of GPTModel._postprocess (up to 0.16) or process_mtp_loss divides by other
  counts. That is a conflict. A model's own _postprocess that calls neither is told by shim.check as unknown.
- cross_entropy_fusion_impl="linear" of the dev branch of 2026-08, on Blackwell: a rank divides by its own count.

Upstream: open (Megatron-LM pull request 7498, issue 7452; mcore-bridge issue 104).

Delete when: the oldest supported release sums the count of targets over the context-parallel group.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._context_parallel_rows import (
    context_parallel_group,
    group_of_row,
    is_parallel,
    roll_unpacked_on_rank,
)
from shim.patches.megatron_core._mtp_layers import labels_of_forks
from shim.patches.megatron_core._rolled_masks import THREAD, RolledMasks, handed_out

MTP = "megatron.core.transformer.multi_token_prediction"
GPT = "megatron.core.models.gpt.gpt_model"
ROLL = MTP + ":roll_tensor"
BLOCK = MTP + ":MultiTokenPredictionBlock.forward"
LOSS = MTP + ":process_mtp_loss"
POSTPROCESS = GPT + ":GPTModel._postprocess"


def _rolled_and_counted(mask: Tensor, times: int, roll: Callable[[Tensor], Any], group: Any) -> tuple[Any, Tensor]:
    """The mask, [b, s], rolled up to `times` times, [1 + times], and the targets of each over all ranks, fp32."""
    masks = [mask]
    for _ in range(times):
        masks.append(roll(masks[-1])[0])
    counts = torch.stack([each.sum(dtype=torch.float32) for each in masks])
    torch.distributed.all_reduce(counts, group=group)
    return masks, counts


def _mean_counts(rolls: RolledMasks, mask: Tensor, depths: int, roll: Callable[[Tensor], Any]) -> None:
    """Up to 0.16, where upstream divides by the count as it is: rolls return the mean count of the ranks."""
    masks, counts = _rolled_and_counted(mask, depths, roll, rolls.group)
    counts = counts / rolls.group.size()
    counts = counts.masked_fill(counts == 0, 1)  # all losses are zero then
    for depth in range(depths):
        rolls.add(masks[depth], masks[depth + 1], counts[depth + 1])


def _row_counts(rolls: RolledMasks, mask: Tensor, depths: int, roll: Callable[[Tensor], Any], before: int) -> Tensor:
    """From 0.17 on, where upstream divides by one target at least: rolls return the count of the row.

    Masks are multiplied by the number of ranks. Before the first depth upstream sums the mask, once it has been rolled
    `before` times. That sum is to be the mean count of the ranks, and the mask that gives it is nothing but its sum.
    Returns the mask for upstream.
    """
    masks, counts = _rolled_and_counted(mask, before + depths, roll, rolls.group)
    ranks = rolls.group.size()
    sums_up = counts.new_zeros(mask.shape)
    sums_up.view(-1)[0] = counts[before] / ranks
    if before:
        rolls.add(mask, sums_up, counts[before])
    given = sums_up
    for depth in range(before, before + depths):
        rolled = masks[depth + 1] * ranks
        rolls.add(given, rolled, counts[depth + 1])
        given = rolled
    return mask if before else sums_up


def _roll_tensor(original: Function, rolls_alone: bool = False) -> Function:
    """Returns what was rolled before. rolls_alone: upstream's roll knows no other rank (0.12, 0.13)."""
    tensor_of, dims_of = argument(original, "tensor"), argument(original, "dims")

    @functools.wraps(original)
    def roll_tensor(*args: Any, **kwargs: Any) -> Any:
        tensor, step = tensor_of(args, kwargs), THREAD.masks
        found = handed_out(tensor)
        if found is not None:
            return found
        if rolls_alone and step is not None:
            rolled = roll_unpacked_on_rank(tensor, dims_of(args, kwargs), step.group)
            return rolled, rolled.sum()
        return original(*args, **kwargs)

    return roll_tensor


def _block(original: Function) -> Function:
    """0.12, 0.13: the MTP block rolls everything and computes the loss. Without labels it raises."""
    labels_of, row_of = argument(original, "labels"), argument(original, "packed_seq_params")
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = labels_of(args, kwargs)
        group = group_of_row(row_of(args, kwargs), context_parallel_group())
        if labels is None or not is_parallel(group):
            return original(*args, **kwargs)
        mask = mask_of(args, kwargs)
        mask = torch.ones_like(labels) if mask is None else mask
        with RolledMasks(group) as rolls:
            roll = sys.modules[MTP].roll_tensor
            _mean_counts(rolls, mask, len(args[0].layers), lambda tensor: roll(tensor, shifts=-1, dims=-1))
            args, kwargs = put_mask(args, kwargs, mask)
            return original(*args, **kwargs)

    return forward


def _postprocess(original: Function, computes_loss: Callable[[Any], bool], rolls_rows: bool) -> Function:
    """0.14 to 0.16: the model computes the loss of each depth. rolls_rows: it passes packed rows to the roll (0.16)."""
    row_of, of_fork = argument(original, "packed_seq_params"), labels_of_forks(original)
    labels_of = of_fork or argument(original, "labels")
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")

    @functools.wraps(original)
    def _postprocess(*args: Any, **kwargs: Any) -> Any:
        model, labels, row = args[0], labels_of(args, kwargs), row_of(args, kwargs)
        if labels is None or not model.post_process or not computes_loss(model):
            return original(*args, **kwargs)
        group = group_of_row(row, model.cp_group)
        if not is_parallel(group):
            return original(*args, **kwargs)
        mask = mask_of(args, kwargs)
        without_mask = mask is None
        mask = given = torch.ones_like(labels) if without_mask else mask
        place = {"cp_group": model.cp_group, **({"packed_seq_params": row} if rolls_rows else {})}
        with RolledMasks(group) as rolls:
            depths = model.config.mtp_num_layers
            if of_fork and without_mask:  # a fork takes ones that are not moved
                given = torch.ones_like(labels)
                rolls.add(given, mask, mask.sum())
            elif of_fork:  # and moves a mask once before the first depth, as the labels
                depths += 1
            roll = sys.modules[GPT].roll_tensor
            _mean_counts(rolls, mask, depths, lambda tensor: roll(tensor, shifts=-1, dims=-1, **place))
            args, kwargs = put_mask(args, kwargs, given)
            return original(*args, **kwargs)

    return _postprocess


def _process_mtp_loss(original: Function) -> Function:
    """From 0.17: the loss is in a function of its own. From 0.19 it may make its labels, by a roll of ids and mask."""
    labels_of, row_of = argument(original, "labels"), argument(original, "packed_seq_params")
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")
    config_of, group_from = argument(original, "config"), argument(original, "cp_group")
    makes_labels = "input_ids" in inspect.signature(original).parameters
    ids_of = argument(original, "input_ids") if makes_labels else lambda args, kwargs: None

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        labels, row, depths = labels_of(args, kwargs), row_of(args, kwargs), config_of(args, kwargs).mtp_num_layers
        like = ids_of(args, kwargs) if labels is None else labels
        group = group_of_row(row, group_from(args, kwargs))
        if like is None or not is_parallel(group) or not depths:
            return original(*args, **kwargs)
        mask = mask_of(args, kwargs)
        mask = torch.ones_like(like) if mask is None else mask
        place = {"cp_group": group_from(args, kwargs), "packed_seq_params": row}
        with RolledMasks(group) as rolls:
            roll = sys.modules[MTP].roll_tensor
            given = _row_counts(
                rolls, mask, depths, lambda tensor: roll(tensor, shifts=-1, dims=-1, **place), int(labels is None)
            )
            args, kwargs = put_mask(args, kwargs, given)
            return original(*args, **kwargs)

    return process_mtp_loss


def _roll_tensors(original: Function) -> Function:
    """The dev branch: rolls a list of tensors, and returns no counts."""
    tensors_of, put_tensors = argument(original, "tensors"), replacing(original, "tensors")
    fields_of, put_fields = argument(original, "sequence_fields"), replacing(original, "sequence_fields")

    @functools.wraps(original)
    def roll_tensor(*args: Any, **kwargs: Any) -> Any:
        tensors, fields = tensors_of(args, kwargs), fields_of(args, kwargs)
        found = [handed_out(tensor) for tensor in tensors]
        if not any(found):
            return original(*args, **kwargs)
        left = [place for place, one in enumerate(found) if one is None]
        args, kwargs = put_tensors(args, kwargs, [tensors[place] for place in left])
        if fields is not None:
            args, kwargs = put_fields(args, kwargs, [fields[place] for place in left])
        rolled = iter(original(*args, **kwargs))
        return [next(rolled) if one is None else one[0] for one in found]

    return roll_tensor


def _process_mtp_loss_of_sums(original: Function) -> Function:
    """The dev branch: divides by the sum of each rolled mask. With per-token loss the log sums losses and counts.

    So the losses of tokens are multiplied by what is missing, and with per-token loss their gradients alone.
    """
    labels_of, row_of = argument(original, "labels"), argument(original, "packed_seq_params")
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")
    config_of, group_from = argument(original, "config"), argument(original, "cp_group")
    ids_of, context_of = argument(original, "input_ids"), argument(original, "sequence_roll_context")
    loss_of = argument(original, "compute_language_model_loss")
    put_loss = replacing(original, "compute_language_model_loss")

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        labels, row, config = labels_of(args, kwargs), row_of(args, kwargs), config_of(args, kwargs)
        like = ids_of(args, kwargs) if labels is None else labels
        group = group_of_row(row, group_from(args, kwargs))
        is_linear = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear"
        if like is None or not is_parallel(group) or not config.mtp_num_layers or is_linear:
            return original(*args, **kwargs)
        mask, before = mask_of(args, kwargs), int(labels is None)
        masks = [torch.ones_like(like) if mask is None else mask]
        for depth in range(before + config.mtp_num_layers):
            [rolled] = sys.modules[MTP].roll_tensor(
                [masks[-1]],
                cp_group=group_from(args, kwargs),
                packed_seq_params=row,
                roll_context=context_of(args, kwargs),
                sequence_fields=["loss_mask"],
                roll_depth=depth,
            )
            masks.append(rolled)
        own = torch.stack([each.sum(dtype=torch.float32) for each in masks])
        counts = own.clone()
        torch.distributed.all_reduce(counts, group=group)
        factors = own.clamp(min=1) / counts.clamp(min=1)
        per_token = config.calculate_per_token_loss
        factors = factors * (counts[before] if per_token else group.size())
        with RolledMasks(group) as rolls:
            if per_token:  # upstream multiplies by the sum of this mask
                one = counts.new_zeros(like.shape)
                one.view(-1)[0] = 1
                rolls.add(one, masks[before + 1], counts)
                if before:
                    rolls.add(masks[0], one, counts)
            for depth, rolled in enumerate(masks[1:]):
                rolls.add(masks[depth], rolled, counts)
            compute, left = loss_of(args, kwargs), iter(factors[before + 1 :])

            def computing(*given: Any, **named: Any) -> Tensor:
                losses, factor = compute(*given, **named), next(left)
                scaled: Tensor = _ScaledGradient.apply(losses, factor) if per_token else losses * factor
                return scaled

            args, kwargs = put_mask(args, kwargs, one if per_token and not before else masks[0])
            args, kwargs = put_loss(args, kwargs, computing)
            return original(*args, **kwargs)

    return process_mtp_loss


class _ScaledGradient(torch.autograd.Function):
    """A tensor whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def _has_mtp(model: Any) -> bool:
    return bool(model.mtp_process)


def _has_mtp_on_any_stage(model: Any) -> bool:
    return bool(model.config.mtp_num_layers)


BINDINGS: dict[str, dict[str, Callable[..., Function]]] = {
    "v0_12": {ROLL: functools.partial(_roll_tensor, rolls_alone=True), BLOCK: _block},
    "v0_14": {
        ROLL: _roll_tensor,
        POSTPROCESS: functools.partial(_postprocess, computes_loss=_has_mtp, rolls_rows=False),
    },
    "v0_16": {
        ROLL: _roll_tensor,
        POSTPROCESS: functools.partial(_postprocess, computes_loss=_has_mtp_on_any_stage, rolls_rows=True),
    },
    "v0_17": {ROLL: _roll_tensor, LOSS: _process_mtp_loss},
    # No release yet: the dev branch alone.
    "v0_19_dev": {ROLL: _roll_tensors, LOSS: _process_mtp_loss_of_sums},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. By which count an override divides its loss shows on several ranks only."""
    config = module.config
    if not getattr(config, "mtp_num_layers", None) or config.context_parallel_size == 1:
        return True
    return "shim cannot see by which count of targets it divides the loss"
