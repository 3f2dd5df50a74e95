"""The cost of each patch if stock is right: operations, messages, and bytes of a whole training step.

    python benchmarks/counts.py [--releases 0.13.1,0.15.3,0.18.2] [--patches A,B]

For each patch, the trainings of shim.testing.trainings on stock and with that patch alone, over gloo on CPU. Counts
have no noise, so every difference is reported. The table is Markdown; docs/benchmarks.md has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

TOP = str(Path(__file__).resolve().parent.parent)
RELEASES = "0.13.1,0.15.3,0.18.2"  # bodies of three generations
UNITS = {"operations": "operations", "messages": "messages", "message_bytes": "B sent", "peak_bytes": "B at peak"}

Found = Mapping[str, Any]  # training -> its Counts, or the error that stock or a patch raises


def counts(world: int, ids: Sequence[str]) -> dict[str, Any]:
    """On this rank, each training of a world of this size under the patches `ids`."""
    import shim
    from shim.testing.trainings import TRAININGS, counted

    found: dict[str, Any] = {}
    for name, training in TRAININGS.items():
        if training.layout.world != world:
            continue
        with shim.patched(only=list(ids), require=list(ids)) if ids else nullcontext():
            try:
                found[name] = counted(training)
            except Exception as error:  # noqa: BLE001 - what stock cannot do has no count
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return found


def told(stock: Found, mine: Found) -> list[str]:
    """The differences, a line for each training."""
    lines = []
    for name, before in stock.items():
        after = mine[name]
        if after == before:
            continue
        if isinstance(before, str) or isinstance(after, str):
            lines.append(f"{name}: {_stock(before)} on stock, {_stock(after)} with the patch")
            continue
        theirs, ours = asdict(before), asdict(after)
        changed = [f"{ours[key] - theirs[key]:+,} {unit}" for key, unit in UNITS.items() if ours[key] != theirs[key]]
        lines.append(f"{name}: {', '.join(changed)}")
    return lines


def compare(release: str, only: Sequence[str]) -> None:
    """The rows of one release, in a separate process that has it."""
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for

    import shim
    from shim import testing

    wanted = [id for id, decision in shim.plan().decisions.items() if decision.wanted and (not only or id in only)]
    stock: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {id: {} for id in wanted}
    for world in (1, 2):
        with testing.Ranks(world) as ranks:
            stock |= ranks.run(counts, world, [], timeout=300)[0]
            for id in wanted:
                found[id] |= ranks.run(counts, world, [id], timeout=300)[0]
    if not only:
        theirs = "; ".join(f"{name} {_stock(found)}" for name, found in stock.items())
        print(f"| {release} | operations of stock | {theirs} |")
    for id in wanted:
        print(f"| {release} | {id} | {'; '.join(told(stock, found[id])) or 'nothing'} |", flush=True)


def _stock(found: Any) -> str:
    return found if isinstance(found, str) else f"{found.operations:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What each patch adds to a training step: counts, stock against shim.")
    parser.add_argument("--releases", metavar="A,B", default=RELEASES)
    parser.add_argument("--patches", metavar="A,B", default="")
    parser.add_argument("--measure", metavar="RELEASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        compare(arguments.measure, [id for id in arguments.patches.split(",") if id])
        return 0
    sys.path.insert(0, TOP)
    from shim.testing import environment, fetch

    print("| megatron-core | patch | beyond stock |\n|---|---|---|", flush=True)
    codes = []
    for release in arguments.releases.split(","):
        command = [sys.executable, "-W", "ignore", __file__, "--measure", release, "--patches", arguments.patches]
        codes.append(subprocess.run(command, env=environment([fetch(release), Path(TOP)])).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
