"""What saving and loading a checkpoint costs: stock and shim, each format, few tensors and many, on two ranks.

    python benchmarks/checkpoints.py [--release 0.18.2] [--release-dir DIR] [--repeats 5] [--tensors 8,100,1000]
                                     [--formats "fully_reshardable;offloaded, dp_reshardable"]

A GPT with a distributed optimizer, whose gradients have several buckets, on two data-parallel replicas (gloo), with an
Adam whose states are those of Apex; and one in bf16 whose optimizer is offloaded to the CPU. A turn saves it into an
empty directory and loads that into another one. Stock and shim (all patches) take turns in one process. Operations are
torch's, below autograd, on the dearer rank; bytes are those of the files. Times are CPU time of a rank and the
processes that it forks to write: the least, and the median. Where stock writes something else than it should, the fix
may cost; docs/benchmarks.md has the reasons.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from on_release import cpu_name, measured, parser_of

RELEASE = "0.18.2"
OFFLOADED = "offloaded, "
SHARDINGS = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space", f"{OFFLOADED}dp_reshardable")
LAYERS = {8: 1, 100: 12, 1000: 125}  # of a model, for about so many tensors
LIMIT, NOISE = 1.02, 0.1
BOTH = ("save", "load")

Turn = dict[str, tuple[float, int] | str]  # "save" or "load" -> seconds, operations; or the error


def turn(directory: str, sharding: str, layers: int, patched: bool) -> tuple[Turn, int]:
    """On this rank: what both cost, and how many tensors the model has."""
    import shim
    from shim import testing
    from shim.testing import Footprint

    def seconds() -> float:
        each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(used.ru_utime + used.ru_stime for used in each)

    def clocked(work: Any) -> tuple[float, int] | str:
        before = seconds()
        try:
            with Footprint() as footprint:
                work(directory)
        except Exception as error:  # noqa: BLE001 - what stock cannot do has no cost
            return str(error).splitlines()[0][:60]
        return seconds() - before, footprint.operations

    on_cpu, layout = testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(ep=2))
    form = sharding.removeprefix(OFFLOADED)
    trainings = usual if form == sharding else offloaded
    with on_cpu, layout, shim.patched() if patched else nullcontext(), trainings(form, layers) as (first, second):
        return {"save": clocked(first.save), "load": clocked(second.load)}, len(list(first.model.parameters()))


@contextmanager
def usual(form: str, layers: int) -> Iterator[tuple[Any, Any]]:
    """A training after a step, and another one."""
    from shim.patches.megatron_core._proof_optimizer_resume import Training, fused_adam

    settings: dict[str, Any] = {"num_layers": layers, "bucket": 500 * layers}
    metadata = {"distrib_optim_sharding_type": form}
    with fused_adam():
        yield Training(metadata, **settings).train(1), Training(metadata, seed=8, **settings)


@contextmanager
def offloaded(form: str, layers: int) -> Iterator[tuple[Any, Any]]:
    """The same with optimizer_cpu_offload, in bf16. Copies between host and device are copies on the CPU."""
    from shim import testing
    from shim.patches.megatron_core._proof_offloading import offloading
    from shim.patches.megatron_core._proof_optimizer_resume import REPLICAS
    from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import Training

    build, mine = testing.build_gpt, {"num_layers": layers, **REPLICAS}
    deep = mock.patch.object(testing, "build_gpt", lambda **options: build(**{**options, **mine}))
    with deep, offloading():
        settings: dict[str, Any] = {"form": form, "lora": False}
        yield Training(**settings).train(0, 1), Training(**settings, seed=9)


def compare(release: str, repeats: int, sizes_of_model: list[int], shardings: Sequence[str]) -> int:
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for
    import torch

    from shim import testing

    torch.set_num_threads(1)
    print(f"megatron-core {release}, torch {torch.__version__}, 2 ranks, {cpu_name()}\n")
    print("| format | tensors | | operations, stock / shim | kB written, stock / shim | CPU, least | median |")
    print("|---|---|---|---|---|---|---|", flush=True)
    over = []
    with testing.Ranks(2) as ranks:
        for sharding in shardings:
            for layers in sizes_of_model:
                turns: dict[bool, list[Any]] = {False: [], True: []}
                sizes: dict[bool, int] = {}
                for number in range(repeats):
                    if number and not any(work(turns[side][0], what) for side in turns for what in BOTH):
                        break  # it never works
                    for patched in (False, True) if number % 2 else (True, False):
                        with tempfile.TemporaryDirectory() as directory:
                            given = (directory, sharding, layers, patched)
                            found = ranks.run(turn, *given, timeout=900)
                            turns[patched].append(found)
                            sizes[patched] = sum(each.stat().st_size for each in Path(directory).rglob("*.distcp"))
                lines, missed = told(sharding, turns, sizes)
                print("\n".join(lines), flush=True)
                over += missed
    print(
        "\n"
        + (f"Above {LIMIT}, and {NOISE:.0%} for noise: {', '.join(over)}" if over else "Nothing is above the limit.")
    )
    return 0


def work(found: list[tuple[Turn, int]], what: str) -> bool:
    """Whether this worked on all ranks of a turn."""
    return not any(isinstance(rank[what], str) for rank, _ in found)


def told(sharding: str, turns: dict[bool, list[Any]], sizes: dict[bool, int]) -> tuple[list[str], list[str]]:
    """Lines of the table, and what is above the limit."""
    lines, over = [], []
    tensors = turns[False][0][0][1]
    for what in BOTH:
        found = [[[rank[what] for rank, _ in each] for each in turns[side]] for side in (False, True)]
        start = f"| {sharding} | {tensors:,} | {what} |"
        if not all(work(turns[side][-1], what) for side in (False, True)):
            texts = [next((rank for rank in each[-1] if isinstance(rank, str)), "works") for each in found]
            lines.append(f"{start} {texts[0]} / {texts[1]} | | | |")
            continue
        times = [[max(rank[0] for rank in each) for each in side] for side in found]  # the slower rank of each turn
        operations = [max(rank[1] for rank in side[-1]) for side in found]
        least, middle = (way(times[1]) / way(times[0]) for way in (min, statistics.median))
        written = f"{sizes[False] / 1e3:,.0f} / {sizes[True] / 1e3:,.0f}" if what == "save" else ""
        lines.append(f"{start} {operations[0]:,} / {operations[1]:,} | {written} | {least:.2f} | {middle:.2f} |")
        if least > LIMIT + NOISE:
            over.append(f"{sharding}, {tensors} tensors, {what} ({least:.2f})")
    return lines, over


def main() -> int:
    parser = parser_of("Saving and loading checkpoints, stock against shim.", RELEASE, repeats=5)
    parser.add_argument("--tensors", default=",".join(map(str, LAYERS)), help="some of these numbers")
    parser.add_argument("--formats", default=";".join(SHARDINGS), help="some of these formats, by semicolons")
    arguments = parser.parse_args()
    if arguments.measure:
        sizes = [LAYERS[int(number)] for number in arguments.tensors.split(",")]
        return compare(arguments.release, arguments.repeats, sizes, arguments.formats.split(";"))
    return measured(__file__, arguments, {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    raise SystemExit(main())
