"""Time, kernels, host reads and messages of rolling a packed row: megatron-core's own roll_tensor against shim's.

    python benchmarks/packed_roll.py [--release 0.19.2] [--release-dir DIR]

Both run in one process, alternating, on rows without padding, with the same result. `one` is a single roll,
for which shim computes its index; `step` is a step with two MTP layers, per roll: input_ids, position_ids,
labels and loss mask are rolled once per layer, and shim computes the index once. Times are medians; over two ranks a
roll takes as long as it takes on the slower one. Times vary with the machine, ratios much less.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from on_release import measured, parser_of

RELEASE = "0.19.2"
TOKENS = 32768
WIDTH = 64
REPEATS = {1: 201, 8: 101, 64: 31, 512: 7}  # by number of sequences, as stock takes longer with each
LAYERS = 2
DEMANDS = {1: 1, 512: 50}  # stock / shim in a step, at least
# Of a ratio, on a machine that is not idle. Where ranks wait for each other's messages, the scheduler has its say.
NOISE, NOISE_OVER_RANKS = 0.1, 0.3
# Freed memory stays with the process, as CUDA's allocator keeps it: else fresh pages cost more than the rolls.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
PATCH = "mtp-packed-sequences"


class Counts(NamedTuple):
    """Of one roll, on rank 0."""

    kernels: float
    host_reads: float
    messages: float


class Line(NamedTuple):
    """Medians in microseconds per roll and counts; `stock` is None if stock cannot do it."""

    sequences: int
    rolls: str
    stock: tuple[float, Counts] | None
    shim: tuple[float, Counts]


# In the process that has the release on its path


@functools.cache
def stock_roll() -> Any:
    """Upstream's roll_tensor, and shim's patch applied to the module it is from.

    The copy sees the module as it was before, so that both can take turns without applying and reverting each time.
    """
    import megatron.core.transformer.multi_token_prediction as mtp

    import shim

    if not hasattr(mtp, "_roll_tensor_packed_seq"):
        raise SystemExit("this release refuses packed rows, so there is nothing to compare with: take 0.16 or later")
    before, function = dict(vars(mtp)), mtp.roll_tensor
    shim.apply(only=[PATCH], require=[PATCH])
    return FunctionType(function.__code__, before, function.__name__, function.__defaults__, function.__closure__)


def shim_roll() -> Any:
    import megatron.core.transformer.multi_token_prediction as mtp

    return mtp.roll_tensor


def row_of(sequences: int, device: str) -> Any:
    """A packed row of random lengths, multiples of four so that two ranks can cut each by zigzag."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    generator = torch.Generator().manual_seed(sequences)
    cuts = torch.randperm(TOKENS // 4 - 1, generator=generator)[: sequences - 1].sort().values + 1
    cu = torch.cat([torch.zeros(1), cuts, torch.tensor([TOKENS / 4])]).mul(4).to(device, torch.int32)
    # Trainers pass the padded offsets with or without padding. Stock does not read them.
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_q_padded=cu.clone())


def count(work: Callable[[], Any], rolls: int) -> Counts:
    """What `work` dispatches, per roll. Views and allocations are no kernels."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found = {"kernels": 0, "host reads": 0, "messages": 0}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function._schema.name
            if name.startswith("c10d::"):
                found["messages"] += name in ("c10d::send", "c10d::recv_")
            elif name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero"):
                found["host reads"] += 1
            elif not function.is_view and not name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
                found["kernels"] += 1
            return function(*args, **(kwargs or {}))

    with Counting():
        work()
    return Counts(*(total / rolls for total in found.values()))


def seconds(work: Callable[[], Any], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """What `work` takes: by the clock on CPU, by events on a GPU."""
    import torch

    if device == "cpu":
        start = clock()
        work()
        return clock() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Work(NamedTuple):
    rolls: str
    number: int
    stock: Callable[[], Any] | None
    shim: Callable[[], Any]


def works(row: Any, group: Any, tokens: int, device: str) -> Iterator[Work]:
    """The measurements on one row, of which this process has `tokens`."""
    import torch

    from shim.patches.megatron_core.mtp_packed_sequences.step import in_step

    ids = [torch.randint(0, 1 << 17, (1, tokens), device=device) for _ in range(3)]
    step = [*ids, torch.ones(1, tokens, device=device)]
    embeddings = torch.randn(tokens, 1, WIDTH, device=device)
    patched, upstream = shim_roll(), stock_roll()

    def one(roll: Any, tensor: Any = ids[0], dim: int = -1) -> Any:
        return roll(tensor, shifts=-1, dims=dim, cp_group=group, packed_seq_params=row)[0]

    def whole_step(roll: Any, tensors: Any = step, dim: int = -1) -> Any:
        for _ in range(LAYERS):
            tensors = [one(roll, tensor, dim) for tensor in tensors]
        return tensors

    def shim_step(*arguments: Any) -> Any:
        with in_step(row):
            return whole_step(patched, *arguments)

    for mine, theirs in zip(shim_step(), whole_step(upstream)):
        assert torch.equal(mine, theirs), "stock and shim differ, so there is nothing to compare"
    with contextlib.suppress(AssertionError):
        one(upstream, embeddings, 0)
        raise SystemExit("stock now rolls along dim 0: also compare there")
    yield Work("one", 1, functools.partial(one, upstream), functools.partial(one, patched))
    yield Work("step", LAYERS * len(step), functools.partial(whole_step, upstream), shim_step)
    yield Work("one, embeddings", 1, None, functools.partial(one, patched, embeddings, 0))
    yield Work("step, embeddings", LAYERS, None, functools.partial(shim_step, [embeddings], 0))


def measure(device: str = "cpu") -> list[tuple[int, str, Any, Any]]:
    """(sequences, rolls, (times, counts) of stock or None, those of shim) for all rows, on this rank."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if ranks > 1 else None
    found = []
    for sequences, repeats in REPEATS.items():
        for work in works(row_of(sequences, device), group, TOKENS // ranks, device):
            sides = {"stock": work.stock, "shim": work.shim}
            counted = {name: count(side, work.number) for name, side in sides.items() if side is not None}
            times: dict[str, list[float]] = {name: [] for name in counted}
            for _ in range(repeats):
                for name in counted:
                    if group is not None:
                        dist.barrier()
                    times[name].append(seconds(sides[name], device) / work.number)
            both = [(times[name], counted[name]) if name in counted else None for name in sides]
            found.append((sequences, work.rolls, *both))
    return found


def joined(ranks: list[list[tuple[int, str, Any, Any]]]) -> list[Line]:
    """One line from the ranks' results: the slower rank's time of each repeat, the counts of rank 0."""
    lines = []
    for same in zip(*ranks):
        sequences, rolls, *sides = same[0]
        medians: list[Any] = []
        for column, side in enumerate(sides, 2):
            if side is None:
                medians.append(None)
                continue
            slower = [max(repeat) for repeat in zip(*(rank[column][0] for rank in same))]
            medians.append((statistics.median(slower) * 1e6, side[1]))
        lines.append(Line(sequences, rolls, *medians))
    return lines


def table(title: str, lines: list[Line], noise: float = NOISE) -> bool:
    """Print the lines and whether they meet the demands; True if they do."""
    pairs = "".join(f"{name:>16}" for name in ("kernels", "host reads", "messages"))
    print(f"\n{title}\n{'':<28}{'us per roll':>18}{'':9}{pairs}")
    print(f"{'sequences  rolls':<28}{'stock':>9}{'shim':>9}{'ratio':>9}" + f"{'stock':>9}{'shim':>7}" * 3)
    verdicts = []
    for line in lines:
        stock, shim = line.stock, line.shim
        ratio = f"{stock[0] / shim[0]:9.2f}" if stock else f"{'-':>9}"
        text = f"{line.sequences:>9}  {line.rolls:<17}{f'{stock[0]:.0f}' if stock else '-':>9}{shim[0]:9.0f}{ratio}"
        for column in range(3):
            text += f"{f'{stock[1][column]:.4g}' if stock else '-':>9}{shim[1][column]:>7.4g}"
        print(text, flush=True)
        least = DEMANDS.get(line.sequences)
        if line.rolls == "step" and least is not None and stock is not None:
            met = stock[0] / shim[0] >= least * (1 - noise)
            verdicts.append((met, f"at least {least} at {line.sequences}: {'ok' if met else 'MISSED'}"))
    print(f"In a step stock / shim, less {noise:.0%} for noise: {', '.join(text for _, text in verdicts)}")
    return all(met for met, _ in verdicts)


def compare(release: str) -> int:
    """All tables, in a separate process; 0 if the demands are met."""
    import torch

    from shim.testing import Ranks

    torch.set_num_threads(1)
    stock_roll()  # and the imports, before ranks are forked
    print(f"megatron-core {release}, torch {torch.__version__}, {torch.get_num_threads()} thread per process")
    print(f"A row of {TOKENS} tokens, without padding. one, step: int64 ids [1, tokens], in a step also a float mask;")
    print(f"embeddings: float32 [tokens, 1, {WIDTH}] along dim 0, which stock refuses (only the last dimension).")
    met = table("CP 1", joined([measure()]))
    with Ranks(2) as ranks:
        met &= table("CP 2 over gloo", joined(ranks.run(measure, timeout=600)), NOISE_OVER_RANKS)
    if torch.cuda.is_available():
        met &= table(f"CP 1 on {torch.cuda.get_device_name()}", joined([measure("cuda")]))
    else:
        print("\nNo NVIDIA GPU here: nothing measured on one.")
    return 0 if met else 1


# In the process that is started by hand


def main() -> int:
    what = "The packed roll of stock megatron-core, from 0.16.0 on, and of shim, side by side."
    arguments = parser_of(what, RELEASE).parse_args()
    return compare(arguments.release) if arguments.measure else measured(__file__, arguments, ALLOCATOR)


if __name__ == "__main__":
    raise SystemExit(main())
