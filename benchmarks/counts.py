"""The cost of each patch if stock is right: Python calls, operations, messages, and bytes of a whole training step.

    python benchmarks/counts.py [--releases 0.13.1,0.18.2,0.18.2+2.16.1] [--patches A,B] [--record]

The trainings of tests/support/trainings.py over gloo on CPU, on stock, with all patches, and with each patch alone; of
a pair with Transformer Engine (its Python sources) also steps of its own layers, of a megatron-core alone some with
twice the layers or ranks, which tells what grows. Patches of which no function runs in any of these steps are applied
together: if not one count differs from stock's, each adds nothing, else they are halved. Counts have no noise, so every
difference is reported. The table is Markdown. --record writes what was counted of these releases to docs/steps.json, of
which `make docs` makes the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
SUPPORT = TOP / "tests" / "support"
RELEASES = "0.13.1,0.18.2,0.16.1+2.12.0,0.18.2+2.16.1,0.19.2+2.20.2"  # three generations, and pairs
RECORD = TOP / "docs" / "steps.json"
ALL = "all patches"
UNITS = {
    "calls": "Python calls",
    "operations": "operations",
    "messages": "messages",
    "message_bytes": "B sent",
    "peak_bytes": "B at peak",
}

Found = Mapping[str, Any]  # training -> what was counted, by the names of UNITS, or the error that is raised


def grown() -> dict[str, Any]:
    """Some of the trainings with twice the layers, or with twice the ranks."""
    from trainings import TRAININGS

    from shim.testing import Layout

    def like(name: str, layout: Layout | None = None, **options: Any) -> Any:
        training = TRAININGS[name]
        return replace(training, layout=layout or training.layout, options={**training.options, **options})

    return {
        "dense, 4 layers": like("dense", num_layers=4),
        "packed, 4 layers": like("packed", num_layers=4),
        "experts, recompute, 4 layers": like("experts, recompute", num_layers=4),
        "TP 4, SP": like("TP 2, SP", Layout(tp=4, sequence_parallel=True), num_query_groups=4),
        "CP 4, packed": like("CP 2, packed", Layout(cp=4)),
        "PP 4": like("PP 2", Layout(pp=4), num_layers=4),  # of which a rank has one, too
        "EP 4": like("EP 2", Layout(ep=4)),
    }


def counts(world: int, ids: Sequence[str], te: bool) -> tuple[dict[str, Any], set[str]]:
    """On this rank, each training of a world of this size under the patches `ids`; the files whose functions ran."""
    from trainings import TE_TRAININGS, TRAININGS, counts_of, python_calls, stepping

    import shim

    found: dict[str, Any] = {}
    files: set[str] = set()
    with shim.patched(only=list(ids), require=list(ids)) if ids else contextlib.nullcontext():
        for name, training in {**TRAININGS, **(TE_TRAININGS if te else grown())}.items():
            if training.layout.world != world:
                continue
            try:
                with stepping(training, te) as step:
                    counted = asdict(counts_of(step) if world == 1 else counts_of(step, times=1))
                    found[name] = {**counted, "calls": python_calls(step, files)}
                if world > 1:
                    del found[name]["peak_bytes"]  # messages under way hold memory for as long as they please
            except Exception as error:  # noqa: BLE001 - what stock cannot do has no count
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return found, files


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
    from device_steps import files_of

    import shim
    from shim import testing

    if te:
        import transformer_engine.pytorch  # noqa: F401

    every = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    with contextlib.ExitStack() as opened:
        pools = [opened.enter_context(testing.Ranks(world)) for world in ((1, 2) if te else (1, 2, 4))]

        def measured(ids: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
            ranks = [pool.run(counts, pool.world, ids, te)[0] for pool in pools]
            return {name: of for found, _ in ranks for name, of in found.items()}, {f for _, ran in ranks for f in ran}

        stock, _ = measured([])
        together, files = measured(every)
        differences = {ALL: beyond(stock, together)}
        ran = {f"shim/{Path(file).relative_to(TOP)}" for file in files if Path(file).is_relative_to(TOP)}
        wanted = [id for id in every if not only or any(fnmatch(id, name) for name in only)]
        silent = [id for id in wanted if not ran & files_of(id)]
        groups = [*([id] for id in wanted if id not in silent), silent]
        while groups:
            ids = groups.pop()
            of_group = beyond(stock, measured(ids)[0]) if ids else {}
            if of_group and len(ids) > 1:
                groups += [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
            else:
                differences |= dict.fromkeys(ids, of_group)
    if not only:
        theirs = "; ".join(f"{name} {_stock(found)}" for name, found in stock.items())
        print(f"| {release} | operations of stock | {theirs} |")
    for id in (ALL, *wanted):
        print(f"| {release} | {id} | {told(differences[id])} |", flush=True)
    if record:
        known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
        patches = {**known.get(release, {}).get("patches", {}), **differences}
        known[release] = {"stock": stock, "patches": {id: patches[id] for id in (ALL, *every) if id in patches}}
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
    sys.path.insert(0, str(TOP))
    from shim.testing import environment, fetch

    print("| megatron-core | patch | beyond stock |\n|---|---|---|", flush=True)
    codes = []
    for release in arguments.releases.split(","):
        command = [sys.executable, "-W", "ignore", __file__, "--measure", release, "--patches", arguments.patches]
        command += ["--record"] * arguments.record
        core, _, engine = release.partition("+")
        paths = [fetch(core), *([fetch(engine, "transformer-engine")] if engine else []), TOP, SUPPORT]
        codes.append(subprocess.run(command, env=environment(paths)).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
