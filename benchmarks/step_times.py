"""CPU time of whole training steps: stock and all patches in turns, as pairs, and the least of each.

    python benchmarks/step_times.py [--release 0.18.2] [--release-dir DIR] [--repeats 30]

A turn applies the patches (and reverts them, for stock), takes two steps that are not timed, and then some that are, on
the same model. The least of all turns is what other work on the machine disturbs least; the median of the ratios of
pairs says how sure that is. Ranks time themselves, and the first one is shown.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from typing import Any

from on_release import cpu_name, measured, parser_of

RELEASE = "0.18.2"
STEPS = 3  # timed at once
LIMIT, NOISE = 1.0, 0.05


def cases() -> dict[str, Any]:
    """Steps on packed rows of four layers, and some that have no packed row."""
    from trainings import FULL, TRAININGS, Training

    from shim.testing import Layout

    deep = {"num_layers": 4}
    return {
        "dense": TRAININGS["dense"],
        "experts": TRAININGS["experts"],
        "packed": Training("packed", options=deep),
        "packed, recompute": Training("packed", options={**deep, **FULL}),
        "packed, MTP": Training("packed", options={**deep, "mtp_num_layers": 1}),
        "packed, CP 2": Training("packed", Layout(cp=2), options=deep),
        "packed, PP 2": Training("schedule", Layout(pp=2), options=deep),
    }


def timed(name: str, repeats: int) -> list[tuple[float, float]] | str:
    """On this rank: seconds of a step, stock and patched, in each turn; or why there are none."""
    from trainings import stepping

    import shim

    def seconds(step: Any, patched: bool) -> float:
        with contextlib.ExitStack() as undo:
            with contextlib.ExitStack() as here:
                (undo if patched else here).enter_context(shim.patched())  # each turn has as much other work behind it
            step()
            step()
            gc.disable()  # what was applied and reverted is no garbage of the step
            start = time.process_time()
            for _ in range(STEPS):
                step()
            taken = time.process_time() - start
            gc.enable()
            return taken / STEPS

    try:
        with stepping(cases()[name]) as step:
            found = []
            for number in range(repeats + 1):
                both = {patched: seconds(step, patched) for patched in ((False, True) if number % 2 else (True, False))}
                found.append((both[False], both[True]))
            return found[1:]  # without the first turn, in which much is done once
    except Exception as error:  # noqa: BLE001 - what stock cannot do has no time
        return f"{type(error).__name__}: {error}".splitlines()[0][:60]


def compare(release: str, repeats: int) -> int:
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for
    import torch

    from shim import testing

    torch.set_num_threads(1)
    print(f"megatron-core {release}, torch {torch.__version__}, 1 thread per process, {cpu_name()}\n")
    print("| step | stock, ms | all patches, ms | least / least | median of pairs |\n|---|---|---|---|---|", flush=True)
    over = []
    for name, training in cases().items():
        with testing.Ranks(training.layout.world) as ranks:
            found = ranks.run(timed, name, repeats)[0]
        if isinstance(found, str):
            print(f"| {name} | {found} | | | |", flush=True)
            continue
        stock, patched = (min(side) * 1e3 for side in zip(*found))
        middle = statistics.median(mine / theirs for theirs, mine in found)
        print(f"| {name} | {stock:.1f} | {patched:.1f} | {patched / stock:.2f} | {middle:.2f} |", flush=True)
        if patched > LIMIT * (1 + NOISE) * stock:
            over.append(name)
    print(f"\nAbove {LIMIT}, and {NOISE:.0%} for noise: {', '.join(over) or 'nothing'}")
    return 1 if over else 0


def main() -> int:
    parser = parser_of("CPU time of training steps, stock against shim.", RELEASE, repeats=30)
    arguments = parser.parse_args()
    if arguments.measure:
        return compare(arguments.release, arguments.repeats)
    return measured(__file__, arguments, {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    raise SystemExit(main())
