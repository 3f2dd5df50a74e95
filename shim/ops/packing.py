"""Padded batches to packed (THD) rows and back, also for context parallelism: without host reads, and a loop over few.

A batch is [B, S, ...]: B sequences of at most S tokens, with padding before them, behind them or in between. Its packed
row is [T, ...]: all sequences, one after another. Each is in a slot, and padding fills the rest of the slot:

    cu_seqlens          int32 [B + 1], the cumulative lengths of the sequences without padding
    cu_seqlens_padded   int32 [B + 1], the cumulative lengths of the slots; the last one is T

A slot is the sequence's length, rounded up to `sequence_alignment`: 2 * cp under context parallelism, else 1. The row
is rounded up to `alignment`, which shim.ops.fp8_alignment computes; this padding is in the last slot. So quantization
costs a row less than one alignment of padding, not as much for every sequence. Without context parallelism there is no
padding between sequences at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shim.ops._checks import is_plain, require
from shim.ops._moves import Places, Runs, moved, once

__all__ = ["Packing", "pack_thd", "unpack_thd"]

_MOST = 1 << 31  # offsets are int32
_FEW = 16  # runs of tokens, in a batch, that a CPU copies faster than it makes an index of all tokens


@dataclass(frozen=True, eq=False)
class Packing:
    """How a batch [B, S, ...] is packed into a row [T, ...], or into one context-parallel rank's share [T / cp, ...].

    `from_mask` and `from_lengths` make one, for tensors on one device. It packs any number of them.

    cu_seqlens, cu_seqlens_padded: int32 [B + 1], of the whole row (see the module).
    total: T, of the whole row.
    max_seqlen: the longest slot; if only a fixed `total` was given, the bound `total`.
    batch: (B, S).
    places: the token in each position, its numbers int32 [T] or [T / cp]: b * S + s + 1, and 0 on padding.
    cp, cp_rank: the number of ranks that share the row, and this rank; None for the whole row.
    whole: the packing of the whole row; None if this is it.
    """

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    total: int
    max_seqlen: int
    batch: tuple[int, int]
    places: Places
    cp: int = 1
    cp_rank: int | None = None
    whole: Packing | None = None

    @classmethod
    def from_mask(
        cls,
        attention_mask: Tensor,
        *,
        alignment: int = 1,
        sequence_alignment: int | None = None,
        cp: int = 1,
        total: int | None = None,
        max_seqlen: int | None = None,
        device: torch.device | str | None = None,
    ) -> Packing:
        """Packs the marked tokens: left-padded rows, right-padded rows, rows with holes, full and empty ones.

        attention_mask: [B, S], bool or any number, not zero at tokens. A sequence may be empty.
        alignment: T becomes a multiple of this (see shim.ops.fp8_alignment).
        sequence_alignment: every slot becomes a multiple of this; by default 2 * cp, or 1 without context parallelism.
        cp: the number of context-parallel ranks that will share the row.
        total: T, fixed. Otherwise the smallest that fits.
        max_seqlen: the longest slot that may occur; checked. By default the longest there is, or with `total` the bound
            `total`, because the last slot has all the padding of the row.
        device: where tensors will be packed; by default the mask's device.

        Host reads: without `total`, T and the longest slot are read from the mask's device, in one read. Nothing is
        read from a GPU if `total` is given, if the mask is on the CPU, or with `from_lengths` and lengths on the CPU.

        ValueError for a mask that is not [B, S] with B above 0, for alignments that are not positive or do not suit cp,
        and for a `total` that is not a multiple of them. If tokens do not fit `total` or `max_seqlen`: ValueError on
        CPU; on a GPU a device-side assertion fails.
        """
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must have the shape [B, S], not {list(attention_mask.shape)}")
        batch = _checked_batch(*attention_mask.shape)
        slot = _checked_alignment(alignment, sequence_alignment, cp, total)
        mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask != 0
        few = _few_runs(mask, device)
        if few is not None:
            return cls._of_runs(
                few,
                batch,
                cp,
                _slots([sum(n for _, n in row) for row in few], slot, alignment, total, max_seqlen, "cpu"),
            )
        lengths = mask.sum(1, dtype=torch.int32)
        cu, padded, total, longest = _slots(lengths, slot, alignment, total, max_seqlen, device or mask.device)
        mask = mask.to(cu.device, non_blocking=True)
        # The number of a token among all tokens, from 1, moved by the padding of the slots before.
        numbers = mask.reshape(-1).cumsum(0, dtype=torch.int32).view(batch)
        numbers = (numbers + (padded - cu)[:-1, None]).mul_(mask)
        in_batch = Places(numbers.view(-1))
        packing = cls(cu, padded, total, longest, batch, in_batch.inverse(total), cp)
        object.__setattr__(packing, "_places_in_batch", in_batch)  # known already
        return packing

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | Sequence[int],
        width: int,
        *,
        padding_side: str = "right",
        alignment: int = 1,
        sequence_alignment: int | None = None,
        cp: int = 1,
        total: int | None = None,
        max_seqlen: int | None = None,
        device: torch.device | str | None = None,
    ) -> Packing:
        """Packs rows whose lengths are known.

        lengths: [B], numbers or an integer tensor, each of 0 to `width`. If they are on the CPU, nothing is read from
            `device`.
        width: S.
        padding_side: the side of the padding, "right" or "left".
        device: where tensors will be packed; by default that of the lengths.

        The other arguments, host reads and errors are those of `from_mask`. ValueError for another side, and for
        lengths that are not integers [B], B above 0; ValueError (on a GPU a device-side assertion) for a length below 0
        or above `width`.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side is {padding_side!r}; it must be 'left' or 'right'")
        given = torch.as_tensor(lengths)
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(f"lengths must be integers of the shape [B], not {given.dtype} {list(given.shape)}")
        batch = _checked_batch(given.numel(), width)
        slot = _checked_alignment(alignment, sequence_alignment, cp, total)
        given = given.int()
        require(((given >= 0) & (given <= width)).all(), f"every length must be between 0 and the width {width}")
        slots = _slots(given, slot, alignment, total, max_seqlen, device or given.device)
        cu, padded, total, longest = slots
        if _is_here(given, device) and batch[0] <= _FEW:
            starts = [width - n if padding_side == "left" else 0 for n in given.tolist()]
            of_rows: list[Runs] = [
                [(row * width + start, n)] for row, (start, n) in enumerate(zip(starts, given.tolist()))
            ]
            return cls._of_runs(of_rows, batch, cp, slots)
        begins = torch.arange(batch[0], dtype=torch.int32, device=cu.device) * width
        ends = padded[:-1] + cu.diff()
        if padding_side == "left":
            begins = begins + (width - cu.diff())
        here = torch.arange(total, dtype=torch.int32, device=cu.device)
        of_slot = torch.repeat_interleave(padded.diff(), output_size=total)
        shift = begins - padded[:-1] + 1
        numbers = (here + shift.index_select(0, of_slot)).mul_(here < ends.index_select(0, of_slot))
        return cls(cu, padded, total, longest, batch, Places(numbers), cp)

    @classmethod
    def _of_runs(cls, few: list[Runs], batch: tuple[int, int], cp: int, slots: _Slots) -> Packing:
        """few: the runs of tokens of each row, by their places in the batch."""
        runs: Runs = []
        for row, size in zip(few, slots.cu_seqlens_padded.diff().tolist()):
            padding = size - sum(n for _, n in row)
            runs += [run for run in row if run[1]] + [(None, padding)] * (padding > 0)
        return cls(*slots[:2], slots.total, slots.max_seqlen, batch, Places(None, False, runs, math.prod(batch)), cp)

    @property
    def valid(self) -> Tensor:
        """bool [T] or [T / cp], True on tokens and False on padding."""
        return self.places.there

    @once
    def positions(self) -> Tensor:
        """int64 [T] or [T / cp], the position of each token in its sequence, from 0; 0 on padding."""
        if self.whole is not None:
            return self.whole.positions.index_select(0, self._share.index)
        here = torch.arange(self.total, device=self.valid.device)
        of_slot = torch.repeat_interleave(self.cu_seqlens_padded.diff(), output_size=self.total)
        return (here - self.cu_seqlens_padded.index_select(0, of_slot)).mul_(self.valid)

    @property
    def attention_mask(self) -> Tensor:
        """bool [B, S], True on tokens; in the packing of a rank, on those that the rank has."""
        return self._places_in_batch.there.view(self.batch)

    def thd_arguments(self, *, attend_padding: bool = False) -> dict[str, Any]:
        """The row for attention: fields of megatron-core's PackedSeqParams, arguments of TE's DotProductAttention.

        qkv_format "thd"; cu_seqlens and cu_seqlens_padded, both for q and kv; max_seqlen, for q and kv. Each rank of
        context parallelism has those of the whole row, as both expect.

        attend_padding: for causal attention. Padding counts as tokens of the sequence before it: cu_seqlens and
            cu_seqlens_padded are one tensor, that of the slots. No token sees padding, every row of the output is
            written, and any kernel will do. Otherwise padding is masked, and the kernel must know padding: flash-attn
            writes no rows behind the last sequence, neither outputs nor gradients.
        """
        cu_seqlens = self.cu_seqlens_padded if attend_padding else self.cu_seqlens
        fields: dict[str, Any] = {"qkv_format": "thd"}
        for side in ("q", "kv"):
            fields[f"cu_seqlens_{side}"] = cu_seqlens
            fields[f"cu_seqlens_{side}_padded"] = self.cu_seqlens_padded
            fields[f"max_seqlen_{side}"] = self.max_seqlen
        return fields

    def pack(self, tensor: Tensor, fill: Any = 0) -> Tensor:
        """[B, S, ...] -> [T, ...], or this rank's [T / cp, ...]: tokens in their places, `fill` on padding.

        Any dtype; a new tensor, differentiable any number of times. ValueError for another shape or device.
        """
        self._check(tensor, *self.batch)
        return moved(tensor.flatten(0, 1), self.places, lambda: self._places_in_batch, fill)

    def unpack(self, tensor: Tensor, fill: Any = 0) -> Tensor:
        """[T, ...], or this rank's [T / cp, ...] -> [B, S, ...], with `fill` without a token (of this rank).

        Any dtype; a new tensor, differentiable any number of times. ValueError for another shape or device. The sum of
        all ranks' results, each filled with 0, has all tokens; `merge` is the other way to get them.
        """
        self._check(tensor, len(self.places))
        return moved(tensor, self._places_in_batch, lambda: self.places, fill).unflatten(0, self.batch)

    def on_rank(self, cp_rank: int) -> Packing:
        """The packing of one context-parallel rank: of each slot, cut in 2 * cp chunks, chunk r and 2 * cp - 1 - r.

        This is the zigzag that balances causal attention in Transformer Engine and megatron-core. ValueError for a rank
        out of range, and if this is the packing of a rank already.
        """
        if self.whole is not None:
            raise ValueError(f"this is the packing of rank {self.cp_rank} already; call on_rank() on its `whole`")
        if not 0 <= cp_rank < self.cp:
            raise ValueError(f"cp_rank is {cp_rank}; the packing has cp={self.cp}")
        return replace(self, places=self.places.at(self._shares(cp_rank)), cp_rank=cp_rank, whole=self)

    def split(self, row: Tensor) -> Tensor:
        """[T, ...] -> [T / cp, ...], this rank's share of a row that is packed already, with its padding.

        Any dtype, differentiable. ValueError for another shape or device, and if this is the packing of a whole row.
        """
        if self.whole is None:
            raise ValueError("split() belongs to the packing of one rank: packing.on_rank(cp_rank).split(row)")
        self._check(row, self.total)
        return moved(row, self._share, lambda: self._share.inverse(self.total))

    def merge(self, shares: Sequence[Tensor] | Tensor) -> Tensor:
        """All ranks' shares in the order of the ranks, each [T / cp, ...] -> the whole row [T, ...].

        shares: a list, as dist.all_gather fills it, or one tensor [T, ...], as dist.all_gather_into_tensor does.

        Any dtype, differentiable. ValueError for another number, shape or device.
        """
        row = shares if isinstance(shares, Tensor) else torch.cat(list(shares))
        self._check(row, self.total)
        whole = self.whole or self
        return moved(row, whole._order, whole._shares)

    @once
    def _places_in_batch(self) -> Places:
        """The position in the row or share of each place of the batch: its numbers int32 [B * S]."""
        return self.places.inverse(self.batch[0] * self.batch[1])

    @once
    def _zigzag(self) -> Tensor:
        """int32 [cp, T / cp], the positions in the row that each rank has, counted from 1."""
        starts, chunk = self.cu_seqlens_padded[:-1], self.cu_seqlens_padded.diff() // (2 * self.cp)
        here = torch.arange(1, self.total // self.cp + 1, dtype=torch.int32, device=chunk.device)
        if self.cp == 1:
            return here[None]
        rank = torch.arange(self.cp, dtype=torch.int32, device=chunk.device)[:, None]
        local = starts // self.cp
        fronts = starts + rank * chunk - local
        tails = starts + (2 * self.cp - 1 - rank) * chunk - (local + chunk)
        of_chunk = torch.repeat_interleave(chunk.repeat_interleave(2), output_size=here.numel())
        return here + torch.stack([fronts, tails], 2).flatten(1).index_select(1, of_chunk)

    def _shares(self, cp_rank: int | None = None) -> Places:
        """The position in the row of each position in the share of a rank, or of all ranks, one after another."""
        if self.places.runs is None:
            zigzag = self._zigzag.flatten() if cp_rank is None else self._zigzag[cp_rank]
            return Places(zigzag, complete=True)
        ranks = range(self.cp) if cp_rank is None else [cp_rank]
        ends = self.cu_seqlens_padded.tolist()
        slots = [(start, (end - start) // (2 * self.cp)) for start, end in pairwise(ends) if end > start]
        if self.cp == 1:
            return Places(None, True, [(0, self.total)], self.total)
        runs: Runs = []
        for rank in ranks:
            for start, chunk in slots:
                runs += [(start + rank * chunk, chunk), (start + (2 * self.cp - 1 - rank) * chunk, chunk)]
        return Places(None, True, runs, self.total)

    @once
    def _share(self) -> Places:
        assert self.whole is not None
        return self.whole._shares(self.cp_rank)

    @once
    def _order(self) -> Places:
        """The position in the shares of all ranks, one after another, of each position of the row."""
        order = self._shares().inverse(self.total)
        return order if order.runs is not None else Places(order.numbers, complete=True)

    def _check(self, tensor: Tensor, *sizes: int) -> None:
        if tensor.shape[: len(sizes)] != sizes:
            expected = ", ".join(map(str, sizes))
            raise ValueError(f"the packing takes a tensor [{expected}, ...] here, not {list(tensor.shape)}")
        if tensor.device != self.cu_seqlens.device:
            raise ValueError(
                f"the packing is on {self.cu_seqlens.device} and the tensor on {tensor.device}; make the packing with "
                f"device={str(tensor.device)!r}"
            )


def pack_thd(
    tensor: Tensor,
    attention_mask: Tensor,
    *,
    alignment: int = 1,
    sequence_alignment: int | None = None,
    cp: int = 1,
    cp_rank: int | None = None,
    total: int | None = None,
    max_seqlen: int | None = None,
    fill: Any = 0,
) -> tuple[Tensor, Packing]:
    """Pack a padded batch: [B, S, ...] -> ([T, ...], its packing), or the share [T / cp, ...] of rank `cp_rank`.

    Labels, loss masks and all further tensors go through `pack` of the packing that comes back. The arguments, host
    reads and errors are those of `Packing.from_mask` and `Packing.pack`. ValueError for `cp` above 1 without `cp_rank`.
    """
    if cp > 1 and cp_rank is None:
        raise ValueError(f"cp is {cp}, so cp_rank must say whose share to pack; for all of it use Packing.from_mask")
    packing = Packing.from_mask(
        attention_mask,
        alignment=alignment,
        sequence_alignment=sequence_alignment,
        cp=cp,
        total=total,
        max_seqlen=max_seqlen,
        device=tensor.device,
    )
    if cp_rank is not None:
        packing = packing.on_rank(cp_rank)
    return packing.pack(tensor, fill), packing


def unpack_thd(packed: Tensor | Sequence[Tensor], packing: Packing, fill: Any = 0) -> Tensor:
    """Back to the batch: [T, ...] -> [B, S, ...], with `fill` without a token.

    packed: in the form of `packing`: [T, ...], or the share [T / cp, ...] of its rank; or a list of all ranks' shares.

    The errors are those of `Packing.unpack` and `Packing.merge`.
    """
    if isinstance(packed, Tensor):
        return packing.unpack(packed, fill)
    return (packing.whole or packing).unpack(packing.merge(packed), fill)


class _Slots(NamedTuple):
    """As the attributes of Packing have them."""

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    total: int
    max_seqlen: int


def _slots(
    lengths: Tensor | list[int],
    sequence_alignment: int,
    alignment: int,
    total: int | None,
    max_seqlen: int | None,
    device: torch.device | str,
) -> _Slots:
    """The slots of sequences of `lengths`, int32 [B] or for the host.

    Computed on the device of lengths, then copied to `device`.
    """
    too_small = f"the sequences, with the padding of their slots, do not fit a total of {total} tokens"
    too_long = f"a slot has more tokens than max_seqlen, which is {max_seqlen}"
    multiple = math.lcm(alignment, sequence_alignment)
    end: Any
    if isinstance(lengths, list):
        sizes = [_rounded_up(length, sequence_alignment) for length in lengths]
        end = _rounded_up(sum(sizes), multiple) if total is None else total
        if sum(sizes) > end:
            raise ValueError(too_small)
        sizes[-1] += end - sum(sizes)
        if max_seqlen is not None and max(sizes) > max_seqlen:
            raise ValueError(too_long)
        if max_seqlen is None:
            max_seqlen = max(sizes) if total is None else total
        _check_total(total := end)
        both = torch.tensor([[0, *accumulate(lengths)], [0, *accumulate(sizes)]], dtype=torch.int32)
    else:
        slots = _rounded_up(lengths, sequence_alignment)
        used = slots.sum()
        if total is not None:
            require(used <= total, too_small)
        end = _rounded_up(used, multiple) if total is None else total
        slots = torch.cat([slots[:-1], (slots[-1] + (end - used)).view(1).int()])
        longest = slots.max()
        if max_seqlen is not None:
            require(longest <= max_seqlen, too_long)
        if total is None:
            total, found = torch.stack([end, longest]).tolist()  # the one read
            max_seqlen = found if max_seqlen is None else max_seqlen
            _check_total(total)
        both = torch.nn.functional.pad(torch.stack([lengths, slots]).cumsum(1, dtype=torch.int32), (1, 0))
    cu, padded = both.to(device, non_blocking=True)  # a copy to the device does not wait for it
    return _Slots(cu, padded, total, total if max_seqlen is None else max_seqlen)


def _check_total(total: int) -> None:
    if total >= _MOST:
        raise ValueError(f"the row has {total} tokens, more than int32 offsets can count")


def _is_here(tensor: Tensor, device: torch.device | str | None) -> bool:
    """Whether the host knows the tensor's values, and tensors will be packed on the CPU."""
    on_cpu = tensor.device.type == "cpu" and (device is None or torch.device(device).type == "cpu")
    return on_cpu and is_plain(tensor) and not torch.compiler.is_compiling()


def _few_runs(mask: Tensor, device: torch.device | str | None) -> list[Runs] | None:
    """The runs of tokens of each row, by their places in the batch, if there are few and the host can look."""
    rows, width = mask.shape
    if rows > _FEW or not _is_here(mask, device):
        return None
    framed = mask.new_zeros(rows, width + 2)
    framed[:, 1:-1] = mask
    edges = (framed[:, 1:] != framed[:, :-1]).nonzero()
    if len(edges) > 2 * _FEW:
        return None
    found: list[Runs] = [[] for _ in range(rows)]
    ends = iter(edges.tolist())
    for (row, start), (_, end) in zip(ends, ends):
        found[row].append((row * width + start, end - start))
    return found


def _rounded_up(number: Any, multiple: int) -> Any:
    return number if multiple == 1 else (number + (multiple - 1)) // multiple * multiple


def _checked_alignment(alignment: int, sequence_alignment: int | None, cp: int, total: int | None) -> int:
    """The alignment of slots. ValueError for arguments that suit no batch."""
    if cp < 1:
        raise ValueError(f"cp is {cp}; it must be at least 1")
    chunks = 2 * cp if cp > 1 else 1
    slot = chunks if sequence_alignment is None else sequence_alignment
    if alignment < 1 or slot < 1:
        raise ValueError(f"alignment is {alignment} and sequence_alignment {slot}; both must be at least 1")
    if slot % chunks:
        raise ValueError(f"sequence_alignment is {slot}; with cp={cp} it must be a multiple of {chunks}")
    multiple = math.lcm(alignment, slot)
    if total is not None and (not 0 <= total < _MOST or total % multiple):
        raise ValueError(
            f"total is {total}; with alignment {alignment} and slots of multiples of {slot} it must be a multiple of "
            f"{multiple} below 2**31"
        )
    return slot


def _checked_batch(rows: int, width: int) -> tuple[int, int]:
    if rows < 1 or width < 0 or rows * width >= _MOST:
        raise ValueError(f"a batch must have at least one row and fewer than 2**31 places, not [{rows}, {width}]")
    return rows, width
