"""`shim diff`: what differs between two locks, or between a lock and what is installed, and what that changes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shim._api import plan
from shim._errors import NotMetError, OptionError
from shim._matrix.load import load_matrix
from shim._matrix.model import CHANGES, Matrix
from shim._planning.digest import differing_parts
from shim._planning.evidence import tree_for, trees_of
from shim._planning.lock import locked, read_lock, words_of_lock
from shim._planning.options import PREFIX, matrix_argument
from shim._planning.plan import Plan
from shim._planning.texts import nothing_installed
from shim._printing.printable import one_line
from shim._tools.arguments import selection
from shim._tools.output import NOT_MET, OK, put

__all__ = ["Difference", "Other", "compare", "do_diff"]

NEW, GONE, CHANGED = "new", "gone", "changed"
# What a patch changes, from the most to the least.
TITLES = {
    "values": "They change values, such as a loss or a gradient:",
    "rounding": "They change the rounding of numbers:",
    "nothing": "They change no number:",
    "": "This shim has no such patch:",
}


@dataclass(frozen=True)
class Other:
    """A patch that is not the same in both locks.

    how: "new", "gone" or "changed".    what: each difference in words.    own_code: whether its own code differs.
    changes: what the patch changes in the numbers of a run: of CHANGES, or "" if this shim does not have the patch.
    """

    how: str
    what: tuple[str, ...]
    own_code: bool
    changes: str
    summary: str


@dataclass(frozen=True)
class Difference:
    """All that differs between two locks.

    releases, digest, matrix, kinds: (then, now) each, if they differ.    drifted: patches that have, or have no longer.
    shim_code: the parts of shim whose code differs.    packages: those of the caller whose files differ.
    bodies: patches that differ only in upstream's bodies that they bind or rely on, with the number of these.
    """

    digest: tuple[str, str]
    releases: Mapping[str, tuple[str, str]]
    matrix: tuple[str, str] | None
    kinds: tuple[list[str], list[str]] | None
    drifted: Mapping[str, str]
    shim_code: list[str]
    packages: list[str]
    patches: Mapping[str, Other] = field(default_factory=dict)
    bodies: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        named = (self.releases, self.matrix, self.kinds, self.drifted, self.shim_code, self.packages, self.patches)
        return any(named) or bool(self.bodies) or self.digest[0] != self.digest[1]


def do_diff(arguments: argparse.Namespace) -> int:
    old, given = read_lock(arguments.old), selection(arguments)
    made: Plan | None = None
    if arguments.new is None:
        if "concerns" not in given and not os.environ.get(PREFIX + "CONCERNS"):
            given["concerns"] = words_of_lock(arguments.old, old)
        made = plan(**given, lock=None)
        if missing := nothing_installed(made.environment):
            raise NotMetError(f"{missing} Or name a second lock.")
        new, matrix, now = locked(made), made.matrix, "what is installed"
        then = tree_for(old, made.environment)
    else:
        if odd := sorted(given.keys() - {"matrix", "packages"}):
            raise OptionError(
                f"--{odd[0].replace('_', '-')} chooses patches of what is installed; leave out it, or NEW"
            )
        new, matrix, now = read_lock(arguments.new), load_matrix(matrix_argument(arguments.matrix)), arguments.new
        then = _most_like(old, new)
    found = compare(then, new, matrix, made)
    more = len(trees_of(old)) + len(trees_of(new)) - 2
    put(_plain(found, more), as_text(found, arguments.old, now, more), arguments.json)
    return NOT_MET if found else OK


def _most_like(old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree of a lock with the most releases of another."""
    there = set(new["releases"].items())
    return max(trees_of(old), key=lambda tree: len(there & set(tree["releases"].items())))


def compare(old: Mapping[str, Any], new: Mapping[str, Any], matrix: Matrix, made: Plan | None = None) -> Difference:
    """What differs between two trees of locks. `matrix` says what each patch changes.

    made: the plan that `new` is of, which says why a patch is gone.
    """
    releases = _both(old["releases"], new["releases"])
    patches: dict[str, Other] = {}
    bodies: dict[str, int] = {}
    for id in _in_order(matrix, {*old["patches"], *new["patches"]}):
        then, now = old["patches"].get(id), new["patches"].get(id)
        code = bool(then and now and then["code"] != now["code"])
        what = list(_what(id, then, now, made))
        if then and now and (other := len(_both(then["fingerprints"], now["fingerprints"]))):
            if what:
                what.append(f"{other} other bod{'y' if other == 1 else 'ies'} of upstream's")
            else:
                bodies[id] = other
        if not what:
            continue
        entry = matrix.patches.get(id)
        patches[id] = Other(
            NEW if then is None else GONE if now is None else CHANGED,
            tuple(what),
            code,
            "" if entry is None else entry.changes,
            "" if entry is None else entry.summary,
        )
    drifted = {id: GONE for id in old["drifted"] if id not in new["drifted"]}
    return Difference(
        digest=(old["digest"], new["digest"]),
        releases=releases,
        matrix=_pair(old["matrix"], new["matrix"]),
        kinds=_pair(old["kinds"], new["kinds"]),
        drifted={**drifted, **{id: NEW for id in new["drifted"] if id not in old["drifted"]}},
        shim_code=differing_parts(old["code"], new["code"]),
        packages=differing_parts(old["packages"], new["packages"]),
        patches=patches,
        bodies=bodies,
    )


def _what(id: str, then: Mapping[str, Any] | None, now: Mapping[str, Any] | None, made: Plan | None) -> Iterator[str]:
    """Each difference of a patch, but for upstream's bodies."""
    if then is None and now is not None:
        yield f"variant {now['variant']}"
    elif now is None:
        decision = None if made is None else made.decisions.get(id)
        yield "no longer applied" if decision is None else f"{decision.action}: {decision.reason}"
    elif then is not None:
        if then["variant"] != now["variant"]:
            yield f"variant {then['variant']} -> {now['variant']}"
        for name, (before, after) in _both(then["options"], now["options"]).items():
            yield f"option {name} {before} -> {after}"
        if then["module"] != now["module"]:
            yield f"module {then['module']} -> {now['module']}"
        if then["code"] != now["code"]:
            yield "other code"


def _both(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (then.get(name), now.get(name))
        for name in sorted({*then, *now})
        if _differ(then.get(name), now.get(name))
    }


def _differ(one: Any, other: Any) -> bool:
    return one != other or type(one) is not type(other)  # to Python, 1 and True are equal


def _pair(then: Any, now: Any) -> tuple[Any, Any] | None:
    return (then, now) if then != now else None


def _in_order(matrix: Matrix, ids: set[str]) -> list[str]:
    return [*(id for id in matrix.patches if id in ids), *sorted(ids - matrix.patches.keys())]


# Output


def _plain(found: Difference, more: int) -> dict[str, Any]:
    return {**asdict(found), "differs": bool(found), "trees_not_compared": more}


def as_text(found: Difference, old: str, now: str, more: int) -> str:
    """more: trees of the locks that were not compared."""
    if not found:
        return f"no difference between {old} and {now}"
    new, gone, changed = (sum(other.how == how for other in found.patches.values()) for how in (NEW, GONE, CHANGED))
    lines = [f"{new} new, {gone} gone, {changed} changed, from {old} to {now}"]
    changes = {**found.releases, "digest": found.digest}
    if found.matrix:
        changes["matrix"] = found.matrix
    if found.kinds:
        changes["kinds"] = (" ".join(found.kinds[0]), " ".join(found.kinds[1]))
    lines += [f"{name} {then or 'none'} -> {after or 'none'}" for name, (then, after) in changes.items()]
    lines += [f"code of shim: {', '.join(found.shim_code)}"] if found.shim_code else []
    lines += [f"files of packages: {', '.join(found.packages)}"] if found.packages else []
    lines += [f"{id} has {'' if how == NEW else 'no longer '}drifted" for id, how in found.drifted.items()]
    lines += [f"not compared: {more} further tree{'' if more == 1 else 's'} of the locks"] if more else []
    lines = [*lines[:1], *(f"  {one_line(line)}" for line in lines[1:])]
    for kind in (*reversed(CHANGES), ""):
        members = {id: other for id, other in found.patches.items() if other.changes == kind}
        lines += ["", TITLES[kind]] if members else []
        for id, other in sorted(members.items(), key=lambda member: (NEW, GONE, CHANGED).index(member[1].how)):
            lines += _of_patch(id, other)
    if found.bodies:
        lines += ["", f"The same on other bodies of upstream's: {len(found.bodies)} ({', '.join(found.bodies)})"]
    return "\n".join(lines)


def _of_patch(id: str, other: Other) -> Iterator[str]:
    yield f"  {other.how:<7} {id}: {'; '.join(other.what)}"
    if other.summary:
        yield f"      {other.summary}"
