"""Evidence: what the proofs of patches have shown on one tree, as `shim pin --prove` writes it into a lock.

It speaks for exactly the bodies that it names, and only if they are in no release. Evidence about the commits and forks
that trainers run ships with shim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shim._record import record
from shim._releases.detect import PATCHED
from shim._releases.known_files import known_trees

if TYPE_CHECKING:
    from shim._releases.detect import Environment

__all__ = [
    "CANNOT_RUN",
    "FIXED",
    "LACKING",
    "NOT_FIXED",
    "RIGHT",
    "TRIAL",
    "Proved",
    "digest_of_bodies",
    "evidence_for",
    "evidence_in",
    "files_of",
    "shipped_evidence",
    "trial_of",
]

FIXED = "fixed"  # stock is wrong, and right with the patch
RIGHT = "right on stock"
LACKING = "lacks the feature"  # so that it cannot have the defect
NOT_FIXED = "not fixed"  # or worse with the patch than without
CANNOT_RUN = "cannot run"  # so nothing was shown
VERDICTS = (FIXED, RIGHT, LACKING, NOT_FIXED, CANNOT_RUN)
SHOWN = (RIGHT, LACKING, FIXED, NOT_FIXED)  # as evidence counts that does not agree
TRIAL = "trial"  # in the processes that run the proofs only: apply it, whatever its bodies are


@record
class Proved:
    """The evidence about one patch.

    verdict: one of VERDICTS.
    variant: the one that was tried. None if stock is right, or lacks the feature.
    bodies: the digest of the bodies of the variant, "" for one that the tree lacks. Without a variant, of all bodies of
        the patch that the tree has.
    shown: the measurements in words, or why nothing could be measured.
    date: the day of the run.
    dropped: targets without which it was tried: no proof runs their bodies, and the patch can do without them.
    trees: the known trees that it ran on. Empty for the tree of a lock.
    where: the first of them in words. A commit of upstream has its day.
    """

    verdict: str
    variant: str | None
    bodies: str
    shown: str = ""
    date: str = ""
    dropped: Sequence[str] = ()
    trees: Sequence[str] = ()
    where: str = ""


def digest_of_bodies(bodies: Mapping[str, str]) -> str:
    """16 hexadecimal digits over a set of bodies: fingerprints by target."""
    text = " ".join(f"{target}={bodies[target]}" for target in sorted(bodies))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def trial_of(variants: Mapping[str, str], left: Mapping[str, Sequence[str]]) -> Mapping[str, Proved]:
    """The options that make a plan apply these variants, by patch, without the targets in `left`."""
    return {id: Proved(TRIAL, variant, "", dropped=left.get(id, ())) for id, variant in variants.items()}


def trees_of(lock: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trees that a lock holds."""
    return [lock, *lock.get("also", ())]


def other_releases(tree: Mapping[str, Any], environment: Environment) -> set[tuple[str, str | None]]:
    """The releases that are only in the tree of a lock, or only here."""
    here = {(name, found.raw) for name, found in environment.installed.items() if name in PATCHED}
    return here ^ {(name, raw) for name, raw in tree["releases"].items() if name in PATCHED}


def tree_for(lock: Mapping[str, Any], environment: Environment) -> Mapping[str, Any]:
    """The tree of a lock that is installed here, or else the one that is most like it.

    Two commits may say the same version. Then the files decide.
    """

    def likeness(tree: Mapping[str, Any]) -> tuple[int, int, int]:
        files = tree.get("proved", {}).get("files", {})  # those that no release has
        same = sum(environment.sources.digest(module) in digests for module, digests in files.items())
        return -len(other_releases(tree, environment)), same - len(files), same

    trees = trees_of(lock)
    return trees[0] if len(trees) == 1 else max(trees, key=likeness)


def evidence_for(lock: Mapping[str, Any] | None, environment: Environment) -> Mapping[str, Proved]:
    """The verdicts of the lock about the patches on the installed tree."""
    if lock is None:
        return {}
    return _of_tree(tree_for(lock, environment))


def _of_tree(tree: Mapping[str, Any]) -> dict[str, Proved]:
    proved = tree.get("proved")
    if proved is None:
        return {}
    names = ("verdict", "variant", "shown")
    return {
        id: Proved(
            bodies=digest_of_bodies(said["fingerprints"]),
            date=proved["date"],
            dropped=said.get("dropped", ()),
            **{name: said[name] for name in names},
        )
        for id, said in proved["patches"].items()
    }


def evidence_in(lock: Mapping[str, Any]) -> dict[str, list[Proved]]:
    """The verdicts of the lock about all its trees, by patch."""
    found: dict[str, list[Proved]] = {}
    for tree in trees_of(lock):
        for id, said in _of_tree(tree).items():
            found.setdefault(id, []).append(said)
    return found


def shipped_evidence(id: str) -> list[Proved]:
    """What the proofs of a patch have shown on commits and forks, for one set of bodies each.

    That stock is right, or lacks the feature, comes first: it was shown for all bodies of the patch, anything else for
    those of one variant.
    """
    known, found = known_trees(), []
    for said in known["patches"].get(id, ()):
        for bodies, text in said["bodies"].items():
            names = text.split()
            tree = known["trees"][names[0]]
            where = f"commit {names[0]} of {tree['day']}" if "day" in tree else ", ".join(names)
            found.append(
                Proved(
                    said["verdict"],
                    said["variant"],
                    bodies,
                    said["shown"],
                    tree["date"],
                    dropped=said["dropped"],
                    trees=names,
                    where=where,
                )
            )
    return sorted(found, key=lambda proved: SHOWN.index(proved.verdict))


def files_of(lock: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """The bodies in the files of all trees of a lock: {module: {digest of the file: {qualified name: fingerprint}}}."""
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    trees: Sequence[Mapping[str, Any]] = [] if lock is None else trees_of(lock)
    for tree in trees:
        for module, digests in tree.get("proved", {}).get("files", {}).items():
            found.setdefault(module, {}).update(digests)
    return found
