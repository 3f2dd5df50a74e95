"""The auxiliary loss of each sequence of a packed row."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument, by_name
from shim.patches.megatron_core._z_loss_calls import counted
from shim.patches.megatron_core.packed_seq_aux_loss.carried import Row, row_of_call


def patch_apply_seq_aux_loss(original: Function) -> Function:
    """From 0.14 on."""
    scores_of, chosen_of = argument(original, "scores_for_aux_loss"), argument(original, "routing_map")
    samples_of, probs_of = argument(original, "bsz"), argument(original, "probs")

    @functools.wraps(original)
    def _apply_seq_aux_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        row, given = row_of_call(), (self, *args)
        weight = self.get_aux_loss_coeff("seq_aux_loss")
        # More than one sample: 0.19 has taken the row apart already.
        if weight == 0 or not _is_packed(row) or samples_of(given, kwargs) != 1:
            return original(self, *args, **kwargs)
        group = self.tp_cp_group
        loss = of_sequences(scores_of(given, kwargs), chosen_of(given, kwargs), row, self.topk, group)
        name = "seq_load_balancing_loss"
        return self.attach_and_log_load_balancing_loss(probs_of(given, kwargs), weight, loss * weight, name, group)

    return _apply_seq_aux_loss


def patch_sequence_load_balancing_loss_func(original: Function) -> Function:
    """Up to 0.13."""
    named = by_name(original)

    @functools.wraps(original)
    def sequence_load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
        row, given = row_of_call(), named(args, kwargs)
        if not _is_packed(row) or given["batch_size"] != 1:
            return original(*args, **kwargs)
        group = given.get("sequence_partition_group")
        loss = of_sequences(given["probs"], given["routing_map"], row, given["topk"], group)
        return loss * given["moe_aux_loss_coeff"]

    return sequence_load_balancing_loss_func


def _is_packed(row: Row | None) -> bool:
    """Whether the row has offsets that are cut over the ranks of the model, and not of dynamic context parallelism."""
    if row is None or row.packed.qkv_format != "thd" or row.packed.cu_seqlens_q is None:
        return False
    return getattr(row.packed, "local_cp_size", None) is None and getattr(row.packed, "cp_group", None) is None


def of_sequences(scores: Tensor, chosen: Tensor, row: Any, topk: int, group: Any) -> Tensor:
    """This rank's part of the loss, without its coefficient: the sum over ranks is the loss of the row.

    scores: [t, E], probabilities of this rank's tokens, zero for padding of a mask. chosen: [t, E], whether a token
    takes an expert, likewise. group: of the ranks that share the row, or None.

    The loss of a sequence of n tokens is E / (topk * n * n) * sum over experts of its scores times its choices, as in
    the Switch Transformer (arXiv 2101.03961).
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    tokens, experts = scores.shape
    place = sequence_of_token(row.packed, tokens, ranks, rank, row.config.context_parallel_size)
    number = row.packed.cu_seqlens_q.numel() - 1
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    zeros = scores.new_zeros(number + 1, experts)  # the last row takes what is in no sequence
    choices = zeros.index_add(0, place, chosen.to(scores.dtype))[:-1]
    if ranks > 1:
        torch.distributed.all_reduce(choices, group=group)
    lengths = choices.sum(1) / topk
    counted(lengths.sum, group)  # the count of stock, which did this for the z-loss, is not called
    if row.config.calculate_per_token_loss:  # the loss is multiplied by the tokens of the row later
        shares = lengths / (tokens * ranks)
    else:
        shares = (lengths > 0) / (lengths > 0).sum().clamp(min=1)
    factors = choices * (shares * experts / (topk * lengths.clamp(min=1) ** 2))[:, None]
    return (zeros.index_add(0, place, scores)[:-1] * factors).sum()


def sequence_of_token(packed: Any, tokens: int, ranks: int, rank: int, cp: int) -> Tensor:
    """The number of the sequence that each of the rank's tokens is in, [t]; of padding the number of sequences.

    A row is cut over context-parallel ranks by zigzag, each sequence with its padding by itself, and such a share over
    tensor-parallel ranks from front to end.
    """
    tp, cp = (ranks // cp, cp) if ranks >= cp else (ranks, 1)
    cp_rank, tp_rank = divmod(rank, tp)
    lengths = packed.cu_seqlens_q.diff()
    offsets = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    own = torch.div(offsets, cp, rounding_mode="floor")  # of the context-parallel rank's share
    token = torch.arange(tokens, device=own.device, dtype=own.dtype) + tp_rank * tokens
    place = torch.bucketize(token, own[1:].contiguous(), right=True)
    known = place.clamp(max=lengths.numel() - 1)
    inside = token - own[known]
    if cp > 1:
        chunk = torch.div(own.diff()[known], 2, rounding_mode="floor")
        back = (2 * cp - 1 - 2 * cp_rank - 1) * chunk  # the second chunk is the rank's from the end
        inside = inside + cp_rank * chunk + torch.where(inside < chunk, 0, back)
    return place.where((place == known) & (inside < lengths[known]), lengths.numel())
