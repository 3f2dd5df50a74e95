"""Time and kernels of rotating a packed row unfused: megatron-core's function against shim's.

    python benchmarks/rope_thd.py [--release 0.19.2] [--release-dir DIR]

Both run in one process, alternating, forward and backward, on the same row and table, and give the same bits, which is
checked. The cost of sequences does not depend on the size of the rotation, so it shows best with one head (as a rank
has it of the keys under tensor parallelism with grouped queries); eight are there for comparison. Times are medians of
CPU time; they vary with the machine, ratios much less. Kernels are exact. Releases that rotate each sequence by itself
are held to the cost of that loop; 0.15 to 0.18 only slice the table in theirs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from on_release import measured, parser_of

RELEASE = "0.19.2"
PATCH = "rope-thd"
WIDTH = 64
TOKENS = 4096
HEADS = (1, 8)
SEQUENCES = (1, 64, 512)
REPEATS = 41
LOOP, NO_LOOP, NOISE = 20, 1, 0.1  # stock / shim, at least: if 512 sequences are rotated one by one, and else
# Freed memory stays with the process, as CUDA's allocator keeps it: else fresh pages cost more than the rotation.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


class Group:
    """A context-parallel group of one rank."""

    size, rank = (lambda self: 1), (lambda self: 0)


def row_of(sequences: int, heads: int) -> tuple[Any, Any, Any]:
    """(t [tokens, heads, width], cu_seqlens, freqs) of random lengths, and a table with a row per position."""
    import torch

    generator = torch.Generator().manual_seed(sequences)
    cuts = torch.randperm(TOKENS - 1, generator=generator)[: sequences - 1].sort().values + 1
    cu = torch.cat([torch.zeros(1), cuts, torch.tensor([float(TOKENS)])]).to(torch.int32)
    # One row more than tokens, so that it is not taken for a table with a row per token.
    sizes = ((TOKENS, heads, WIDTH), (TOKENS + 1, 1, 1, WIDTH))
    t, freqs = (torch.randn(size, generator=generator) for size in sizes)
    return t, cu, freqs


def kernels(work: Callable[[], Any]) -> int:
    """How many `work` dispatches. Views and allocations are none."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function._schema.name
            self.found += not function.is_view and not name.startswith(
                ("aten::empty", "aten::new_empty", "aten::detach")
            )
            return function(*args, **(kwargs or {}))

    with Counting() as counting:
        work()
    return counting.found


def rotate(function: Any, t: Any, cu_seqlens: Any, freqs: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """(result, gradient of t)"""
    leaf = t.detach().requires_grad_()
    result = function(leaf, cu_seqlens, freqs, **options)
    result.backward(t)
    return result.detach(), leaf.grad


def medians(works: list[Callable[[], Any]]) -> list[float]:
    """CPU time of each in microseconds, taken in turns."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for taken, work in zip(times, works):
            start = time.process_time()
            work()
            taken.append(time.process_time() - start)
    return [statistics.median(taken) * 1e6 for taken in times]


def compare(release: str) -> int:
    """The table, in a separate process; 0 if the demands are met."""
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from shim import apply

    torch.set_num_threads(1)
    stock = rope_utils._apply_rotary_pos_emb_thd
    apply(only=[PATCH], require=[PATCH])
    functions = [stock, rope_utils._apply_rotary_pos_emb_thd]
    options = {"cp_group": Group()} if "cp_group" in stock.__code__.co_varnames else {}
    if not options:  # 0.12 asks megatron-core
        rope_utils.parallel_state.get_context_parallel_world_size = lambda: 1
        rope_utils.parallel_state.get_context_parallel_rank = lambda: 0

    print(f"megatron-core {release}, torch {torch.__version__}, {torch.get_num_threads()} thread")
    print(f"A row of {TOKENS} tokens, float32 [tokens, heads, {WIDTH}], forward and backward.")
    print(f"\n{'':<18}{'us of CPU time':>18}{'':9}{'kernels':>16}")
    print(f"{'sequences  heads':<18}{'stock':>9}{'shim':>9}{'ratio':>9}{'stock':>9}{'shim':>7}")
    verdicts = []
    for heads in HEADS:
        for sequences in SEQUENCES:
            works = [functools.partial(rotate, f, *row_of(sequences, heads), options) for f in functions]
            for mine, theirs in zip(*(work() for work in works)):
                assert torch.equal(mine, theirs), "stock and shim differ, so there is nothing to compare"
            counts = [kernels(work) for work in works]
            stock, shim = medians(works)
            print(f"{sequences:>9}  {heads:<7}{stock:9.0f}{shim:9.0f}{stock / shim:9.2f}{counts[0]:>9}{counts[1]:>7}")
            if heads == 1 and sequences != 64:
                least = LOOP if counts[0] > sequences > 1 else NO_LOOP
                met = stock / shim >= least * (1 - NOISE)
                verdicts.append((met, f"at least {least} at {sequences}: {'ok' if met else 'MISSED'}"))
    print(f"Stock / shim with one head, less {NOISE:.0%} for noise: {', '.join(text for _, text in verdicts)}")
    return 0 if all(met for met, _ in verdicts) else 1


def main() -> int:
    arguments = parser_of("Unfused packed rotations of stock megatron-core and of shim.", RELEASE).parse_args()
    return compare(arguments.release) if arguments.measure else measured(__file__, arguments, ALLOCATOR)


if __name__ == "__main__":
    raise SystemExit(main())
