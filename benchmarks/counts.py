"""The cost of each patch if stock is right: Python calls, operations, messages, and bytes of a whole training step.

    python benchmarks/counts.py [--releases 0.13.1,0.18.2,0.18.2+2.16.1] [--patches A,B] [--record]

For each patch, the trainings of shim.testing.trainings on stock and with that patch alone, over gloo on CPU; of a pair
with Transformer Engine (its Python sources) also steps of its own layers. Counts have no noise, so every difference is
reported. The table is Markdown. --record writes what was counted of these releases to docs/steps.json, of which
`make docs` makes the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TOP = str(Path(__file__).resolve().parent.parent)
RELEASES = "0.13.1,0.18.2,0.16.1+2.12.0,0.18.2+2.16.1,0.19.2+2.20.2"  # three generations, and pairs
RECORD = Path(TOP) / "docs" / "steps.json"
ALL = "all patches"
UNITS = {
    "calls": "Python calls",
    "operations": "operations",
    "messages": "messages",
    "message_bytes": "B sent",
    "peak_bytes": "B at peak",
}

Found = Mapping[str, Any]  # training -> what was counted, by the names of UNITS, or the error that is raised


def counts(world: int, ids: Sequence[str], te: bool) -> dict[str, Any]:
    """On this rank, each training of a world of this size under the patches `ids`."""
    import shim
    from shim.testing.trainings import TE_TRAININGS, TRAININGS, called, counted

    found: dict[str, Any] = {}
    for name, training in {**TRAININGS, **(TE_TRAININGS if te else {})}.items():
        if training.layout.world != world:
            continue
        with shim.patched(only=list(ids), require=list(ids)) if ids else nullcontext():
            try:
                found[name] = {**asdict(counted(training, te)), "calls": called(training, te)}
                if world > 1:
                    del found[name]["peak_bytes"]  # messages under way hold memory for as long as they please
            except Exception as error:  # noqa: BLE001 - what stock cannot do has no count
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return found


def beyond(stock: Found, mine: Found) -> dict[str, Any]:
    """training -> unit -> how many more than stock, or both outcomes if one is an error. What is equal is left out."""
    found: dict[str, Any] = {}
    for name, before in stock.items():
        after = mine[name]
        if isinstance(before, str) or isinstance(after, str):
            both = [
                value if isinstance(value, str) else f"{value['operations']:,} operations" for value in (before, after)
            ]
            if both[0] != both[1]:
                found[name] = f"{both[0]} on stock, {both[1]} with the patch"
            continue
        differences = {unit: after.get(key, 0) - before.get(key, 0) for key, unit in UNITS.items()}
        if any(differences.values()):
            found[name] = {unit: difference for unit, difference in differences.items() if difference}
    return found


def told(differences: Mapping[str, Any]) -> str:
    """A part for each training."""
    texts = [
        f"{name}: {found if isinstance(found, str) else ', '.join(f'{n:+,} {unit}' for unit, n in found.items())}"
        for name, found in differences.items()
    ]
    return "; ".join(texts) or "nothing"


def compare(release: str, only: Sequence[str], record: bool) -> None:
    """The rows of one release or pair, in a separate process that has it."""
    te = "+" in release
    if te:
        from shim import testing

        testing.transformer_engine_on_cpu()
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for

    import shim
    from shim import testing

    if te:
        import transformer_engine.pytorch  # noqa: F401

    every = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    wanted = [id for id in every if not only or any(fnmatch(id, name) for name in only)]
    stock: dict[str, Any] = {}
    sides = {ALL: every, **{id: [id] for id in wanted}}
    found: dict[str, dict[str, Any]] = {id: {} for id in sides}
    for world in (1, 2):
        with testing.Ranks(world) as ranks:
            stock |= ranks.run(counts, world, [], te, timeout=900)[0]
            for id, ids in sides.items():
                found[id] |= ranks.run(counts, world, ids, te, timeout=900)[0]
    if not only:
        theirs = "; ".join(f"{name} {_stock(found)}" for name, found in stock.items())
        print(f"| {release} | operations of stock | {theirs} |")
    differences = {id: beyond(stock, of_patch) for id, of_patch in found.items()}
    for id, of_patch in differences.items():
        print(f"| {release} | {id} | {told(of_patch)} |", flush=True)
    if record:
        known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
        known[release] = {"stock": stock, "patches": {**known.get(release, {}).get("patches", {}), **differences}}
        RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", "utf-8")


def _stock(found: Any) -> str:
    return found if isinstance(found, str) else f"{found['operations']:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What each patch adds to a training step: counts, stock against shim.")
    parser.add_argument("--releases", metavar="A,B", default=RELEASES)
    parser.add_argument("--patches", metavar="A,B", default="", help="these alone, as a shell writes names: te-*")
    parser.add_argument("--record", action="store_true", help="write docs/steps.json")
    parser.add_argument("--measure", metavar="RELEASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        compare(arguments.measure, [id for id in arguments.patches.split(",") if id], arguments.record)
        return 0
    sys.path.insert(0, TOP)
    from shim.testing import environment, fetch

    print("| megatron-core | patch | beyond stock |\n|---|---|---|", flush=True)
    codes = []
    for release in arguments.releases.split(","):
        command = [sys.executable, "-W", "ignore", __file__, "--measure", release, "--patches", arguments.patches]
        command += ["--record"] * arguments.record
        core, _, engine = release.partition("+")
        paths = [fetch(core), *([fetch(engine, "transformer-engine")] if engine else []), Path(TOP)]
        codes.append(subprocess.run(command, env=environment(paths)).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
