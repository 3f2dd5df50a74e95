"""`shim pin --prove`: proofs decide about the patches that their bodies do not decide, and the lock says so."""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from shim._api import plan
from shim._errors import NotMetError, OptionError
from shim._matrix.load import PACKAGE, patches_path
from shim._planning.digest import file_digest, files_below, own_code, own_digests
from shim._planning.evidence import (
    CANNOT_RUN,
    FIXED,
    LACKING,
    NOT_FIXED,
    RIGHT,
    digest_of_bodies,
    evidence_for,
    other_releases,
    trees_of,
)
from shim._planning.lock import VERDICT_KEYS, read_lock, write_lock
from shim._planning.plan import Plan, make_plan
from shim._planning.requirements import enforce
from shim._planning.texts import nothing_installed
from shim._printing.markdown import plain
from shim._proving.decide import Decided, Judgement, decide
from shim._proving.kept import Kept
from shim._proving.run import Request
from shim._releases.known_files import known_files, measure_files
from shim._tools.fetching import first_on_path
from shim._tools.output import NOT_MET, OK, put, tell
from shim._tools.progress import Progress
from shim._tools.prove import check_sides, require_torch

__all__ = ["AGAINST", "do_pin_prove", "inputs_of", "proved_part"]

AGAINST = "The proofs speak against the matrix:"  # the heading of contradictions, which `make release-of` looks for
INTERRUPTED = 130  # as a shell says it
VERDICTS = {
    FIXED: "Accepted, since stock is wrong here and right with the patch:",
    RIGHT: "Not needed here, since stock is right:",
    LACKING: "Not needed here, since the tree lacks the feature:",
    NOT_FIXED: "Left out, since they do not fix this tree, or make it worse:",
    CANNOT_RUN: "Not known, since the proofs show nothing here:",
}


def do_pin_prove(arguments: argparse.Namespace, selection: Mapping[str, Any]) -> int:
    """Run the proofs, and write the lock or (with --check) compare it. 1 if --check finds another verdict."""
    lock = Path(arguments.lock)
    content = read_lock(lock) if arguments.check or (arguments.also and lock.exists()) else None
    check_sides(arguments.jobs, arguments.timeout)
    require_torch("cpu")
    with first_on_path(arguments.against) if arguments.against else nullcontext():
        made = plan(**{**selection, "lock": None})
        _require_something(made)
        try:
            decided = _decided(made, lock, arguments)
        except KeyboardInterrupt:
            tell("shim: interrupted. The measurements are kept: the same command continues from there")
            return INTERRUPTED
        if arguments.check:
            assert content is not None
            return _compared(made, decided, content, arguments)
        return _written(made, decided, [] if content is None else trees_of(content), arguments)


def _require_something(made: Plan) -> None:
    if made.options.disabled:
        raise OptionError("MEGATRON_SHIM_DISABLE is set, so there is nothing to prove; unset it")
    if missing := nothing_installed(made.environment):
        raise NotMetError(f"{missing} No lock was written.")


def _decided(made: Plan, lock: Path, arguments: argparse.Namespace) -> Decided:
    kept = Kept(lock.with_name(f".{lock.name}.proving"), inputs_of(made))
    if len(kept):
        tell(f"shim: going on with {len(kept)} measurements of the run that was interrupted")
    progress = Progress()
    try:
        found = decide(
            made, Request(jobs=arguments.jobs, timeout=arguments.timeout, kept=kept, complete=True), progress
        )
    finally:
        progress.done()
    kept.forget()
    return found


def inputs_of(made: Plan) -> dict[str, Any]:
    """The inputs of measurements besides the proof: all files of the tree and of shim, torch, and Python."""
    places = [found.location for name, found in made.environment.installed.items() if name != "torch"]
    return {
        "files": [_files_digest(place) for place in (*places, str(PACKAGE), str(patches_path()))],
        "code": own_code(own_digests()),  # with the shipped matrix and its pins
        "matrix": made.matrix.content,
        "releases": {name: found.raw for name, found in made.environment.installed.items()},
        "python": platform.python_version(),
        "path": [entry for entry in sys.path if entry],
    }


def _files_digest(directory: str) -> str:
    lines = sorted(f"{name} {file_digest(file)}" for name, file in files_below(directory, (".py",)))
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def proved_part(made: Plan, decided: Decided) -> dict[str, Any]:
    """The part of the lock that holds the verdicts."""
    files: dict[str, dict[str, dict[str, str]]] = {}
    bodies = sorted({body for entry in made.matrix.patches.values() for body in entry.bodies})
    measure_files(made.environment.sources, bodies, files)
    made.environment.sources.forget_trees()
    known = known_files()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": made.environment.installed["torch"].raw if "torch" in made.environment.installed else "",
        "python": platform.python_version(),
        "where": f"CPU, {platform.system()} {platform.machine()}",
        "generic": decided.generic,
        "files": {
            module: unknown
            for module, digests in files.items()
            if (unknown := {digest: found for digest, found in digests.items() if digest not in known.get(module, {})})
        },
        "patches": {
            judgement.id: {
                **{name: getattr(judgement, name) for name in VERDICT_KEYS},
                **({"dropped": list(judgement.dropped)} if judgement.dropped else {}),
            }
            for judgement in decided.judgements
        },
    }


def _written(made: Plan, decided: Decided, others: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> int:
    """Write the lock. others: trees that the lock holds already, and keeps unless they are this very tree."""
    proved = proved_part(made, decided)
    seen = {"releases": {}, "proved": proved}
    decided_plan = make_plan(
        made.environment, made.matrix, replace(made.options, lock_content=seen), losses=made.losses
    )
    enforce(decided_plan)

    def same(tree: Mapping[str, Any]) -> bool:
        """Whether an entry is of this very tree: it has the same files, or, without proofs, the same releases."""
        return not other_releases(tree, made.environment) and tree.get("proved", proved)["files"] == proved["files"]

    also = [{name: part for name, part in tree.items() if name != "also"} for tree in others if not same(tree)]
    content = write_lock(arguments.lock, decided_plan, proved, also)
    _print(f"wrote {arguments.lock}: digest {content['digest']}", decided_plan, decided, content, arguments)
    return OK


def _compared(made: Plan, decided: Decided, lock: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Compare the verdicts with those of the lock. 1 if one differs."""
    excluded = {id for id, decision in made.decisions.items() if decision.action == "excluded"}
    said = {id: proved for id, proved in evidence_for(lock, made.environment).items() if id not in excluded}
    now = {judgement.id: judgement for judgement in decided.judgements}
    odd = []
    for id in sorted({*said, *now}):
        then, today = said.get(id), now.get(id)
        if then is None or today is None:
            odd.append(f"{id}: {_of(then)} in the lock, {_of(today)} now")
        elif (then.verdict, then.variant, *then.dropped) != (today.verdict, today.variant, *today.dropped):
            odd.append(f"{id}: {_of(then)} in the lock, {_of(today)} now ({today.shown})")
        elif then.bodies != digest_of_bodies(today.fingerprints):
            odd.append(f"{id}: its bodies are not those of the lock")
    for line in odd:
        tell(f"shim: {line}")
    text = f"{arguments.lock} differs from the proofs for {len(odd)} patches" if odd else f"{arguments.lock} holds"
    _print(text, made, decided, {"differences": odd}, arguments)
    return NOT_MET if odd else OK


def _of(found: Any) -> str:
    if found is None:
        return "nothing"
    without = f" without {', '.join(map(str, found.dropped))}" if found.dropped else ""
    return found.verdict + (f" (variant {found.variant}{without})" if found.variant else "")


def _print(first: str, made: Plan, decided: Decided, data: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.markdown:
        put({}, _as_markdown(made, decided), False, whole=True)
    else:
        put(data, _as_text(first, decided), arguments.json)


def _as_text(first: str, decided: Decided) -> str:
    lines = [first, f"  {_counted(decided)}"]
    for verdict, title in VERDICTS.items():
        members = [j for j in decided.judgements if j.verdict == verdict]
        width = max((len(j.id) for j in members), default=0)
        lines += ["", title] if members else []
        lines += [f"  {j.id:<{width}}  {_with_variant(j)}{j.shown}" for j in members]
    if decided.generic:
        lines += ["", "A small model with all that is applied:"]
        lines += [f"  {name}: {sides.get('with_shim', '')}" for name, sides in decided.generic.items()]
    if decided.told:
        lines += ["", AGAINST, *(f"  {told}" for told in decided.told)]
    return "\n".join(lines)


def _with_variant(judgement: Judgement) -> str:
    return f"{judgement.variant}: " if judgement.variant else ""


def _counted(decided: Decided) -> str:
    counts = {verdict: sum(j.verdict == verdict for j in decided.judgements) for verdict in VERDICTS}
    names = ("accepted", "right on stock", "without the feature", "left out", "cannot run")
    shown = ", ".join(f"{count} {name}" for name, count in zip(names, counts.values(), strict=True))
    return f"{len(decided.judgements)} patches judged by their proofs: {shown}"


def _as_markdown(made: Plan, decided: Decided) -> str:
    releases = ", ".join(f"{name} {found.raw}" for name, found in made.environment.installed.items())
    lines = [f"### shim pin --prove: {plain(releases)}", "", f"{_counted(decided)}.", ""]
    lines += ["| patch | verdict | variant | measured on stock -> with the patch |", "|---|---|---|---|"]
    lines += [f"| {j.id} | {j.verdict} | {j.variant or ''} | {plain(j.shown)} |" for j in decided.judgements]
    lines += ["", "| generic proof | stock | with shim |", "|---|---|---|"] if decided.generic else []
    lines += [
        f"| {name} | {plain(sides.get('stock', ''))} | {plain(sides.get('with_shim', ''))} |"
        for name, sides in decided.generic.items()
    ]
    return "\n".join([*lines, *_told(decided.told)])


def _told(told: Sequence[str]) -> list[str]:
    return ["", AGAINST, "", *(f"- {plain(line)}" for line in told)] if told else []
