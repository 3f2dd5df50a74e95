"""The memory of experts' saved activations, and the cost of storing and restoring them: stock autograd,
megatron-core's paged stash (0.18, 0.19) and shim's, side by side.

    python benchmarks/paged_stash.py [--release 0.19.2] [--release-dir DIR] [--quick]

Bytes are counted, not timed. A stack of gated experts computes in buffers of a fixed number of rows, of which only the
first ones hold tokens, another number in each microbatch: from 0.8 to 1.2 times rows / capacity. All three do the same
schedule with the same tokens, and have to find the same gradients, bit for bit. The second iteration is counted, when
both stashes have buffers; upstream's get as many pages as shim's needed, because upstream's sizing can give too
few. A dispatch mode sees every storage that is made from the first iteration on, and its end:

    held       the most between two passes over a microbatch: saved tensors, pools, rings, lists of pages, flags, counts
    limit      the tokens alone: sum of tokens * width over the same saved tensors
    used       pages in use when most were, over the limit then
    spare      the most that used pages were beyond the tokens, in pages for each saved tensor
    restored   the most that was restored at one time, over the saved tensors of one layer
    peak       the most at any time, also in a pass

Weights and their gradients were there before. Nothing inside a kernel is seen, for neither of the two: upstream's need
a GPU and are done by torch operations of the same effect, and shim's eager backend replaces its kernels.

On a GPU shim drops an original when the host has seen that its pages were filled. The second table sets by hand how
many layers the host is ahead by then. Upstream drops the originals of a layer when the next one begins.

Operations, launches of kernels, and bytes moved are those of one layer with three saved tensors, beyond the layer's
own; Triton's are interpreted, and not timed. Times are CPU time of one tensor, put away and restored by shim's eager
backend, over clone() and copy_() back, medians of turns in the same run. Where there is an NVIDIA GPU, one more table:
the same with the kernels of both, and the tokens' bytes per second as a share of the rate of a copy on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOP = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, TOP)

from on_release import ALLOCATOR  # noqa: E402
from packed_roll import seconds  # noqa: E402
from paged_stash_sides import (  # noqa: E402
    FFN,
    HIDDEN,
    LAYERS,
    MICROBATCHES,
    ROWS,
    UPSTREAM,
    Experts,
    Shim,
    Stock,
    Upstream,
    Watching,
    build,
    kernels_on_cpu,
    missing_upstream,
    settings,
)

from shim.testing import FetchError, environment, fetch  # noqa: E402

RELEASE = "0.19.2"
WIDTHS = HIDDEN, 2 * FFN, FFN  # the saved tensors of one layer: its input, the product of fc1, the input of fc2
LAYER = ROWS * sum(WIDTHS) * 4  # bytes
SCHEDULES = {"1F1B": 4, "all forward": MICROBATCHES}  # microbatches in flight
CAPACITIES = 1.0, 1.5, 2.0
PAGE_SIZES = 1, 16, 64, 256
AHEAD = 0, 1, 2, 4
MIB = 1 << 20
ON_CPU, ON_GPU = (1, 4, 16, 64), (1, 16, 64, 256, 1024)  # MiB of a tensor
COLUMNS, PAGE_SIZE, WIDE = 1024, 64, 4096  # width on CPU; page size of the timed stash; width on a GPU
HELD_LIMIT = 1.01  # shim's over upstream's, at most


# Bytes


def token_counts(capacity: float) -> list[list[int]]:
    """Of each microbatch, in each layer."""
    chosen = random.Random(0)
    return [
        [min(ROWS, int(ROWS / capacity * chosen.uniform(0.8, 1.2))) for _ in range(LAYERS)] for _ in range(MICROBATCHES)
    ]


def schedule(in_flight: int) -> Iterator[tuple[str, int]]:
    for forward in range(MICROBATCHES + in_flight - 1):
        if forward < MICROBATCHES:
            yield "forward", forward
        if forward >= in_flight - 1:
            yield "backward", forward - in_flight + 1


class Bytes(NamedTuple):
    """Of one iteration. used and spare are nothing without shim's pools; work: operations, launches of kernels and
    bytes that operations move, in each kind of step."""

    held: int
    restored: int
    peak: int
    limit: int
    used: int
    spare: float
    work: dict[str, list[int]]


def iterate(
    side: Any, layers: list[Experts], counts: list[list[int]], capacity: float, in_flight: int, watching: Any
) -> Bytes:
    """One iteration, under `watching`."""
    held = limit = used = 0
    spare = 0.0
    anchor = torch.zeros(1, requires_grad=True)
    losses: dict[int, Tensor] = {}
    watching.forget_peaks()
    side.begin()
    work = {"forward": [0, 0, 0], "backward": [0, 0, 0]}
    for step, number in schedule(in_flight):
        before = watching.work()
        if step == "forward":
            side.microbatch()
            x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(number)) + anchor
            for experts, count in zip(layers, counts[number]):
                x = side.layer(experts, x, count, int(ROWS / capacity))
            losses[number] = x.sum()  # saves nothing
            del x
        else:
            losses.pop(number).backward()
        work[step] = [sum(parts) for parts in zip(work[step], watching.work(), (-part for part in before))]
        held = max(held, watching.held_bytes)
        tokens = sum(sum(counts[number]) for number in losses)
        limit = max(limit, tokens * sum(WIDTHS) * 4)
        if isinstance(side, Shim):
            wanted = side.wanted_bytes()
            used = max(used, wanted)
            page = side.config.moe_paged_stash_page_size * sum(WIDTHS) * 4
            if losses:
                spare = max(spare, (wanted - tokens * sum(WIDTHS) * 4) / page / (LAYERS * len(losses)))
    return Bytes(held, watching.most_restored, watching.peak_bytes, limit, used, spare, work)


def second_iteration(make: Callable[[Any, Watching], Any], page_size: int, capacity: float, in_flight: int) -> Any:
    """(bytes of the second iteration, its gradients, the side)."""
    config = settings(page_size)
    layers = build(config)
    watching = Watching()
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernels_on_cpu(watching))
        side = make(config, watching)
        stack.callback(side.close)
        stack.enter_context(watching)
        for _ in range(2):
            for experts in layers:
                experts.w1.grad.zero_(), experts.w2.grad.zero_()
            found = iterate(side, layers, token_counts(capacity), capacity, in_flight, watching)
        if isinstance(side, Upstream):
            side.check()
    return found, [weight.grad for experts in layers for weight in experts.parameters()], side


def enough_for_upstream(side: Shim, capacity: float, in_flight: int) -> float:
    """The factor by which upstream's buffers have as many pages as the pools of `side`."""
    tokens = [sum(counts) for counts in token_counts(capacity)]
    most = max(sum(tokens[first : first + in_flight]) for first in range(MICROBATCHES - in_flight + 1))
    pages = max(pool.pages for pool in side.pools() if pool.width == FFN)
    return (pages * side.config.moe_paged_stash_page_size + 0.5) / most


def compare_bytes(quick: bool, upstream: bool, verdicts: list[str]) -> None:
    print(f"\n{LAYERS} layers of {ROWS} rows, {MICROBATCHES} microbatches; float32, saved widths {WIDTHS}")
    print(f"{'':37}{'held / stock':>22}{'used /':>8}{'':7}{'restored':>16}{'peak / stock':>16}")
    heads = ("schedule", 12), ("capacity", 9), ("page", 5), ("stock MiB", 11), ("limit", 7), ("shim", 7), ("upstr.", 8)
    others = ("limit", 8), ("spare", 7), ("shim", 8), ("upstr.", 8), ("shim", 8), ("upstr.", 8)
    print("".join(f"{head:>{width}}" for head, width in (*heads, *others)))
    for name, in_flight in SCHEDULES.items():
        for capacity in CAPACITIES[::2] if quick else CAPACITIES:
            stock, right, _ = second_iteration(lambda *_: Stock(), 1, capacity, in_flight)
            for page_size in PAGE_SIZES[1::2] if quick else PAGE_SIZES:
                mine, gradients, side = second_iteration(Shim, page_size, capacity, in_flight)
                title = f"{name}, capacity {capacity}, pages of {page_size}"
                kept = side.stash.statistics().kept - LAYERS * MICROBATCHES * len(WIDTHS)  # of the first iteration
                theirs, their_gradients = None, right
                if upstream:
                    factor = enough_for_upstream(side, capacity, in_flight)
                    theirs, their_gradients, _ = second_iteration(
                        lambda config, watching, factor=factor: Upstream(config, watching, factor),
                        page_size,
                        capacity,
                        in_flight,
                    )
                cells = [
                    f"{name:>12}{capacity:9}{page_size:5}{stock.held / MIB:11.1f}{mine.limit / stock.held:7.2f}",
                    f"{mine.held / stock.held:7.3f}{over(theirs and theirs.held, stock.held):>8}",
                    f"{mine.used / mine.limit:8.3f}{mine.spare:7.2f}",
                    f"{mine.restored / LAYER:8.2f}{over(theirs and theirs.restored, LAYER, 2):>8}",
                    f"{mine.peak / stock.peak:8.2f}{over(theirs and theirs.peak, stock.peak, 2):>8}",
                ]
                print("".join(cells), flush=True)
                if kept or mine.spare >= 1:
                    verdicts.append(f"{title}: {kept} originals kept, {mine.spare:.2f} pages beyond the tokens")
                if theirs is not None and mine.held > HELD_LIMIT * theirs.held:
                    verdicts.append(f"{title}: holds more than upstream")
                for other, found in ("shim", gradients), ("upstream", their_gradients):
                    if not all(map(torch.equal, found, right)):
                        verdicts.append(f"{title}: other gradients with {other}")
    page_size, capacity, in_flight = PAGE_SIZE, 2.0, SCHEDULES["1F1B"]
    print(f"\nheld / stock, 1F1B, capacity {capacity}, pages of {page_size}")
    stock, _, _ = second_iteration(lambda *_: Stock(), page_size, capacity, in_flight)
    others = {f"the host {ahead} layers ahead": {"ahead": ahead} for ahead in AHEAD}
    for name, options in {**others, "rows by a mask": {"masked": True}}.items():
        found, _, _ = second_iteration(lambda *a, o=options: Shim(*a, **o), page_size, capacity, in_flight)
        print(f"{name:<24}{found.held / stock.held:7.3f}", flush=True)


def over(found: float | None, base: float, digits: int = 3) -> str:
    return "-" if found is None else f"{found / base:.{digits}f}"


# Operations


def compare_operations(upstream: bool) -> None:
    """Of a layer amid others, beyond those of the layer itself."""
    capacity, in_flight = 2.0, SCHEDULES["1F1B"]
    sides: dict[str, Callable[[Any, Watching], Any]] = {"shim, eager": lambda *a: Shim(*a, backend="eager")}
    if has_triton_backend():
        sides["shim, triton"] = lambda *a: Shim(*a, backend="triton")
    if upstream:
        sides["upstream"] = lambda *a: Upstream(*a, factor=factor)
    stock, _, _ = second_iteration(lambda *_: Stock(), PAGE_SIZE, capacity, in_flight)
    passes = LAYERS * MICROBATCHES
    tokens = sum(map(sum, token_counts(capacity))) * sum(WIDTHS) * 4
    print(f"\nOne layer with {len(WIDTHS)} saved tensors, 1F1B, capacity {capacity}, pages of {PAGE_SIZE}")
    print(f"{'':14}{'operations + launches':>24}{'bytes / tokens saved':>24}{'peak / stock':>15}")
    print(f"{'':14}{'forward':>12}{'backward':>12}{'forward':>12}{'backward':>12}")
    for name, make in sides.items():
        found, _, side = second_iteration(make, PAGE_SIZE, capacity, in_flight)
        if isinstance(side, Shim):
            factor = enough_for_upstream(side, capacity, in_flight)
        launched, moved = [], []
        for step in "forward", "backward":
            more = [(mine - base) / passes for mine, base in zip(found.work[step], stock.work[step])]
            launched.append(f"{more[0]:.1f} + {more[1]:.0f}")
            # Kernels' bytes are given, not counted: the tokens, and from shim also zeros for the other restored rows.
            zeros = capacity * ROWS / capacity / (tokens / passes / sum(WIDTHS) / 4)
            by_kernels = 0.0 if not more[1] else 1 + zeros if "shim" in name and step == "backward" else 2.0
            moved.append(more[2] * passes / tokens + by_kernels)
        cells = [f"{part:>12}" for part in launched] + [f"{part:12.2f}" for part in moved]
        print(f"{name:<14}{''.join(cells)}{found.peak / stock.peak:15.2f}", flush=True)


def has_triton_backend() -> bool:
    try:
        import_module("shim.ops._stash_triton")
    except ImportError as error:
        print(f"\nNo Triton backend here ({error}).")
        return False
    return True


# Time


def round_trips(tensor: Tensor, tokens: int, upstream: bool) -> dict[str, Callable[[], Tensor]]:
    """name -> what puts a tensor [rows, width] away and brings it back; "copy" copies it once."""
    from shim.ops._stash_pool import PagePool, backend_for
    from shim.ops._stash_rows import valid_rows
    from shim.ops._stashed_tensor import StashedTensor

    device, (rows, width) = tensor.device, tensor.shape
    pages = -(-tokens // PAGE_SIZE)
    pool = PagePool(tensor.dtype, width, PAGE_SIZE, pages, 0, device, backend_for(None, device))
    count = torch.tensor([tokens], device=device)
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    mask[torch.randperm(rows, device=device)[:tokens]] = True
    back = torch.empty_like(tensor)

    def through_pages(valid: Tensor) -> Tensor:
        where = torch.zeros(1, dtype=torch.int64, device=device)
        of_it = valid_rows(rows, valid, device)
        record = StashedTensor(tensor, of_it, pool, where, expected=tokens, kept=False)
        restored = record.restore()
        record.release()
        return restored

    found = {
        "copy": lambda: back.copy_(tensor),
        "clone": lambda: back.copy_(tensor.clone()),
        "prefix": lambda: through_pages(count),
        "mask": lambda: through_pages(mask),
    }
    if upstream:
        module = import_module(UPSTREAM)
        flags = torch.zeros(2, 1, dtype=torch.int64, device=device)
        buffer = module.PagedStashBuffer(tokens, width, PAGE_SIZE, device, *flags, tensor.dtype)

        def through_buffer() -> Tensor:
            paged = module.PagedTensor(
                tensor, num_tokens_tensor=count, max_num_tokens=rows, hidden_size=width, page_size=PAGE_SIZE
            )
            paged.offload_to_stash(buffer)
            paged._tensor = torch.empty_like(tensor)
            paged.reload_from_stash(buffer)
            return paged._tensor

        found["upstream"] = through_buffer
    for name, work in found.items():
        valid = mask if name == "mask" else slice(tokens)
        assert torch.equal(work()[valid], tensor[valid]), f"{name} brings back something else"
    return found


def compare_times(device: str, sizes: tuple[int, ...], repeats: int, upstream: bool) -> None:
    """Time over clone's; on a GPU also the tokens' bytes per second, read and written twice, over those of a copy."""
    dtype, width = (torch.float32, COLUMNS) if device == "cpu" else (torch.bfloat16, WIDE)
    where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    print(
        f"\nOne tensor of {dtype} [rows, {width}] put away and brought back on {where}: time over clone() and copy_()"
    )
    for size in sizes:
        rows = size * MIB // width // dtype.itemsize
        tensor = torch.randn(rows, width, device=device).to(dtype)
        for capacity in 1.0, 2.0:
            tokens = int(rows / capacity)
            works = round_trips(tensor, tokens, upstream)
            turns = [
                {name: seconds(work, device, time.process_time) for name, work in works.items()} for _ in range(repeats)
            ]
            taken = {name: statistics.median(turn[name] for turn in turns) for name in works}
            cells = [f"{size:6} MiB, capacity {capacity}: clone {taken['clone'] * 1e3:8.3f} ms"]
            for name in list(works)[2:]:
                share = 2 * tokens / rows * taken["copy"] / taken[name]
                cells.append(f"{name} {taken[name] / taken['clone']:5.2f}" + (f" ({share:.0%})" * (device != "cpu")))
            print(", ".join(cells), flush=True)
    if device != "cpu":
        print("In brackets: the share of a copy's bandwidth on the device.")


# In the processes that have the release on their path


def measure(release: str, device: str, quick: bool) -> int:
    import shim.ops.paged_stash

    assert shim.ops.paged_stash.__file__.startswith(TOP)
    torch.set_num_threads(1)
    missing = missing_upstream()
    if device == "cuda" and not torch.cuda.is_available():
        print("no GPU: not measured")
        return 0
    if device == "cuda":
        compare_times(device, ON_GPU[:2] if quick else ON_GPU, 20, missing is None)
        return 0
    print(f"megatron-core {release}, " * (missing is None) + f"torch {torch.__version__}, 1 thread")
    if missing is not None:
        print(f"no stash of megatron-core here ({missing}): shim against stock autograd and clone alone")
    verdicts: list[str] = []
    compare_bytes(quick, missing is None, verdicts)
    compare_operations(missing is None)
    compare_times(device, ON_CPU[:2] if quick else ON_CPU, 7 if quick else 15, False)
    print("\n" + ("\n".join(f"MISSED: {verdict}" for verdict in verdicts) or "All demands are met."))
    return 1 if verdicts else 0


# In the process that is started by hand


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Saved activations of experts in memory: stock, upstream's stash, shim's."
    )
    parser.add_argument("--release", default=RELEASE, help="the stash came with 0.18")
    parser.add_argument("--release-dir", help="an unpacked megatron-core of that release; default: fetched")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns")
    parser.add_argument("--measure", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(arguments.release, arguments.measure, arguments.quick)
    environ = {**os.environ, "PYTHONPATH": TOP, "PYTHONWARNINGS": "ignore", **ALLOCATOR}
    try:
        directory = arguments.release_dir or fetch(arguments.release, progress=print)
        environ = environment(directory, environ)
    except FetchError as error:
        print(error)
    command = [sys.executable, __file__, "--release", arguments.release, *["--quick"] * arguments.quick, "--measure"]
    # Kernels are interpreted, or replaced; a GPU would be in the way of both.
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = subprocess.run([*command, "cpu"], env={**environ, **interpreted}).returncode
    return subprocess.run([*command, "cuda"], env=environ).returncode or code


if __name__ == "__main__":
    raise SystemExit(main())
