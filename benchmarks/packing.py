"""Time, operations and host reads of packing a batch: loops over rows, as trainers have them, against shim.ops.

    python benchmarks/packing.py

All run in one process, in turns of four microbatches, on the same left-padded batch. They give the same tokens, which
is checked. The loops say in this project's words what the trainers' functions do:

- slices      the shortest possible loop: lengths read once, then a slice for each row
- mask        verl 0.9.1 and SkyRL: preprocess_packed_seqs and postprocess_packed_seqs, which index each row by its
              mask
- pieces      NeMo-RL: _pack_sequences_for_megatron and _unpack_sequences_from_megatron, which read each row's length,
              pad each piece and join them. Rows are right-padded there; here they are turned first, which is not timed.
- lists       slime: get_batch, whose rows are without padding in a list from the start, so CP 1 needs no loop to
              pack. Its log-probabilities are split into a list again.

`one` packs and unpacks one tensor, and makes the packing for it. `batch` does it for a microbatch: ids, labels, loss
mask and position ids are packed, and log-probabilities unpacked. Under CP 2 a rank packs its share, and unpacks both.
Operations are dispatched operators without views and allocations; on a GPU each is a launch. A time is the least CPU
time of all repeats, because other work on the machine only adds. Times vary with the machine, ratios less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOP = str(Path(__file__).resolve().parent.parent)
PLACES, ALIGNMENT = 65536, 128  # of a batch, of which about half are tokens
SEQUENCES = {1: 41, 8: 41, 64: 21, 512: 11}  # with repeats
# Of loop / shim for a microbatch of 512 sequences: operations and host reads together, and time, less the noise.
FEWER, FASTER, NOISE = 20, {"mask": 20, "pieces": 10}, 0.1
# Freed memory stays with the process, as CUDA's allocator keeps it: else fresh pages cost more than the packing.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}

Packed = tuple[list[Any], Any]


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Batch:
    """Left-padded tensors [B, S], the same right-padded, the same as lists of rows without padding."""

    def __init__(self, rows: int, cp: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(rows)
        self.cp, self.width = cp, (width := PLACES // rows)
        self.lengths = torch.randint(1, width + 1, (rows,), generator=generator)
        right = torch.arange(width) < self.lengths[:, None]
        self.mask = right.flip(1)
        ids, labels = (torch.randint(1, 1 << 17, (rows, width), generator=generator) for _ in range(2))
        places = torch.arange(width).expand(rows, width).contiguous()
        self.tensors = [ids, labels, torch.ones(rows, width), places]
        self.right = []
        for tensor in self.tensors:
            turned = torch.zeros_like(tensor)
            turned[right] = tensor[self.mask]
            self.right.append(turned)
        self.lists = [[row[kept] for row, kept in zip(tensor, self.mask)] for tensor in self.tensors]
        self.slot = 2 * cp if cp > 1 else 1

    def slots(self, lengths: list[int]) -> list[int]:
        slots = [rounded_up(length, self.slot) for length in lengths]
        slots[-1] += rounded_up(sum(slots), ALIGNMENT) - sum(slots)
        return slots


def offsets(lengths: list[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def shares_of(piece: Any, slot: int, cp: int) -> list[tuple[Any, Any]]:
    """A padded piece in the two chunks of each rank."""
    half = slot // (2 * cp)
    return [(piece[half * r : half * (r + 1)], piece[slot - half * (r + 1) : slot - half * r]) for r in range(cp)]


# Each packs `count` tensors for rank 0, and unpacks a float tensor that is like the last one


def row_by_row(batch: Batch, count: int, by_mask: bool) -> Packed:
    """The loops of `slices` and `mask`: a row of zeros into which each sequence is written."""
    import torch

    lengths = batch.mask.sum(1).tolist()
    slots = batch.slots(lengths)
    cu, cp, packed = offsets(slots), batch.cp, []
    for tensor in batch.tensors[:count]:
        out = tensor.new_zeros(cu[-1] // cp)
        for i, length in enumerate(lengths):
            tokens = tensor[i, batch.mask[i]] if by_mask else tensor[i, batch.width - length :]
            if cp == 1:
                out[cu[i] : cu[i] + length] = tokens
                continue
            half, start = slots[i] // (2 * cp), cu[i] // cp
            if (front := tokens[:half]).numel():
                out[start : start + len(front)] = front
            if (tail := tokens[slots[i] - half :]).numel():
                out[start + half : start + half + len(tail)] = tail
        packed.append(out)
    shares = [packed[-1].float()] * cp
    rows = torch.zeros(batch.mask.shape)
    for i, length in enumerate(lengths):
        if cp == 1:
            row = shares[0][cu[i] : cu[i] + length]
        else:
            half, start = slots[i] // (2 * cp), cu[i] // cp
            whole = shares[0].new_empty(slots[i])
            for r, share in enumerate(shares):
                whole[half * r : half * (r + 1)] = share[start : start + half]
                whole[slots[i] - half * (r + 1) : slots[i] - half * r] = share[start + half : start + 2 * half]
            row = whole[:length]
        if by_mask:
            rows[i, batch.mask[i]] = row
        else:
            rows[i, batch.width - length :] = row
    return packed, rows


def pieces(batch: Batch, count: int) -> Packed:
    import torch

    packed = []
    for tensor in batch.right[:count]:
        lengths = [batch.lengths[i].item() for i in range(len(batch.lengths))]
        slots = batch.slots(lengths)
        parts = []
        for i in range(len(lengths)):
            length = batch.lengths[i].item()
            piece = tensor[i, :length]
            if slots[i] > length:
                piece = torch.nn.functional.pad(piece, (0, slots[i] - length))
            if batch.cp > 1:
                piece = torch.cat(shares_of(piece, slots[i], batch.cp)[0])
            parts.append(piece)
        cu = torch.tensor(offsets(slots), dtype=torch.int32)
        packed.append(torch.cat(parts))
    share, cp = packed[-1].float(), batch.cp
    whole = share
    if cp > 1:
        starts = [start // cp for start in offsets(slots)]
        joined = []
        for i, slot in enumerate(slots):
            half, start = slot // (2 * cp), starts[i]
            fronts = [share[start : start + half]] * cp
            joined += fronts + [share[start + half : start + 2 * half]] * cp
        whole = torch.cat(joined)
    rows = torch.zeros(batch.mask.shape)
    for i in range(len(lengths)):
        length, start = batch.lengths[i].item(), cu[i].item()
        rows[i, :length] = whole[start : start + length]
    return packed, rows


def lists(batch: Batch, count: int) -> Packed:
    import torch

    packed, cp = [], batch.cp
    for rows in batch.lists[:count]:
        if cp > 1:
            parts = []
            for row in rows:
                half = -(-len(row) // (2 * cp))
                row = torch.nn.functional.pad(row, (0, 2 * cp * half - len(row)))
                parts.append(torch.cat([row[:half], row[(2 * cp - 1) * half :]]))
        else:
            parts = rows
        cu = [0]
        for part in parts:
            cu.append(cu[-1] + part.size(0))
        row = torch.cat(parts)
        packed.append(torch.nn.functional.pad(row, (0, rounded_up(len(row), ALIGNMENT // cp) - len(row))))
    share = packed[-1].float()
    found = []
    for i, row in enumerate(batch.lists[0]):
        if cp == 1:
            found.append(share[cu[i] : cu[i] + len(row)])
            continue
        half, start = (cu[i + 1] - cu[i]) // 2, cu[i]
        fronts = [share[start : start + half]] * cp
        found.append(torch.cat([*fronts, *[share[start + half : start + 2 * half]] * cp])[: len(row)])
    return packed, found


def ours(batch: Batch, count: int, lengths: bool = False) -> Packed:
    from shim.ops import Packing

    options = {"alignment": ALIGNMENT, "cp": batch.cp}
    if lengths:
        whole = Packing.from_lengths(batch.lengths, batch.width, padding_side="left", **options)
    else:
        whole = Packing.from_mask(batch.mask, **options)
    rank = whole.on_rank(0) if batch.cp > 1 else whole
    packed = [rank.pack(tensor) for tensor in batch.tensors[:count]]
    share = packed[-1].float()
    return packed, whole.unpack(whole.merge([share] * batch.cp) if batch.cp > 1 else share)


WORKS: dict[str, Callable[[Batch, int], Packed]] = {
    "slices": lambda batch, count: row_by_row(batch, count, by_mask=False),
    "mask": lambda batch, count: row_by_row(batch, count, by_mask=True),
    "pieces": pieces,
    "lists": lists,
    "shim": ours,
    "shim, lengths": lambda batch, count: ours(batch, count, lengths=True),
}


def check(batch: Batch) -> None:
    """Every work packs the same tokens and brings the same back."""
    import torch

    expected, rows = ours(batch, 4)
    for name, work in WORKS.items():
        packed, back = work(batch, 4)
        if name == "lists":  # pads each share at its end, so the last sequence is cut elsewhere under CP 2
            assert [len(row) for row in packed] == [len(row) for row in expected]
            assert batch.cp > 1 or all(map(torch.equal, packed, expected))
            assert batch.cp > 1 or torch.equal(torch.cat(back), rows[batch.mask])
            continue
        assert all(map(torch.equal, packed, expected)), name
        if name == "pieces":
            assert torch.equal(back[batch.mask.flip(1)], rows[batch.mask]), name
        else:
            assert torch.equal(back, rows), name


def counted(work: Callable[[Batch, int], Packed], batch: Batch, count: int) -> tuple[int, int]:
    """(operations, host reads) of `work`; on a GPU an index by a mask reads how many it found."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    operations, reads = 0, 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal operations, reads
            name = function._schema.name.removeprefix("aten::")
            if name == "_local_scalar_dense":
                reads += 1
            elif not function.is_view and not name.startswith(("empty", "new_empty", "detach")):
                operations += 1
                indices = args[1] if name in ("index", "index_put_") else ()
                reads += any(index is not None and index.dtype == torch.bool for index in indices)
            return function(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist

    def counting(tensor: Any) -> Any:
        nonlocal reads
        reads += 1
        return tolist(tensor)

    torch.Tensor.tolist = counting  # type: ignore[method-assign]
    try:
        with Counting():
            work(batch, count)
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
    return operations, reads


def seconds(work: Callable[[Batch, int], Packed], batch: Batch, count: int) -> float:
    start = time.process_time()
    work(batch, count)
    return time.process_time() - start


def measure(cp: int) -> bool:
    """Print the table of this size of context parallelism; whether shim is as much faster as it must be."""
    print(f"\nCP {cp}\n{'':<20}{'one':>28}{'batch':>37}")
    columns = f"{'us':>9}{'ratio':>8}{'operations':>12}{'reads':>7}"
    print(f"{'sequences':<11}{'':<15}{columns}{columns}")
    met = True
    for rows, repeats in SEQUENCES.items():
        batch = Batch(rows, cp)
        check(batch)
        found: dict[str, list[Any]] = {name: [] for name in WORKS}
        for count in (1, 4):
            times: dict[str, list[float]] = {name: [] for name in WORKS}
            for _ in range(repeats):
                for name, work in WORKS.items():
                    times[name] += [seconds(work, batch, count) for _ in range(4)]
            least = {name: min(taken) for name, taken in times.items()}
            for name, work in WORKS.items():
                found[name].append((least[name], least[name] / least["shim"], *counted(work, batch, count)))
        for name, cells in found.items():
            text = "".join(f"{t * 1e6:>9.0f}{ratio:>8.2f}{ops:>12}{reads:>7}" for t, ratio, ops, reads in cells)
            print(f"{rows:>9}  {name:<15}{text}", flush=True)
        if rows == max(SEQUENCES):
            work = {name: sum(found[name][1][2:]) / sum(found["shim"][1][2:]) for name in ("slices", "mask", "pieces")}
            faster = {name: found[name][1][1] for name in FASTER}
            met = min(work.values()) >= FEWER and all(faster[n] >= FASTER[n] * (1 - NOISE) for n in FASTER)
            told = ", ".join(f"{name} {ratio:.0f}" for name, ratio in work.items())
            print(f"A batch of {rows}, operations and reads, loop / shim, at least {FEWER}: {told}")
            told = ", ".join(f"{name} {ratio:.1f} (at least {FASTER[name]})" for name, ratio in faster.items())
            print(
                f"A batch of {rows}, time, loop / shim, less {NOISE:.0%} for noise: {told}: {'ok' if met else 'MISSED'}"
            )
    return met


def main() -> int:
    if "--measure" not in sys.argv:
        environ = {**os.environ, "PYTHONPATH": TOP, **ALLOCATOR}
        return subprocess.run([sys.executable, __file__, "--measure"], env=environ).returncode
    import torch

    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, 1 thread; batches of {PLACES} places, half of them tokens, alignment {ALIGNMENT}"
    )
    print("us: CPU time; ratio: time / time of shim")
    met = [measure(cp) for cp in (1, 2)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
