"""Step 2, match: the version names a candidate variant, and its bodies decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from packaging.version import Version

from shim._matrix.model import NOT_NEEDED, UPSTREAM, Matrix, PatchEntry, Rule, Variant
from shim._planning.bodies import GONE, Bodies
from shim._planning.evidence import CANNOT_RUN, FIXED, LACKING, NOT_FIXED, TRIAL, Proved, shipped_evidence
from shim._planning.evidence import RIGHT as RIGHT_ON_STOCK
from shim._record import record, replace
from shim._releases.detect import Environment
from shim._releases.fingerprint import split_target

__all__ = ["Match", "match"]


@record
class Match:
    """The meaning of the installed sources for one patch.

    state: ``apply``, ``upstream``, ``not-needed``, ``not-installed``, ``out-of-range`` or ``drifted``.
    fingerprints: those of the bodies of `variant`.
    drifted: the bodies that are not known with this variant, each with the reason.
    dropped: targets that the patch does without, because their bodies are not known, each with the reason.
    signatures_fit: whether every target can still be called as the patch calls it.
    cause: why the first of `drifted` is not known: "changed", "unpinned", or the cause of its SourceError. "unshown":
        the version is one of those that are right without the patch, and nothing shows that this release is.
        "disproved": the proofs of the patch have failed on these very bodies.
    """

    state: str
    reason: str
    variant: str | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    drifted: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    signatures_fit: bool = False
    cause: str = ""


def _beyond(entry: PatchEntry, versions: Mapping[str, Version], matrix: Matrix) -> bool:
    """Whether the release is newer than all supported ones, or of unknown version, so that its needs are unknown."""
    supported = matrix.supported.get(entry.distribution)
    version = versions.get(entry.distribution)
    return version is None or not supported or version > max(map(Version, supported))


def match(entry: PatchEntry, environment: Environment, matrix: Matrix, proved: Proved | None = None) -> Match:
    """Return which variant of `entry` the installed release needs, and why.

    A distribution of unknown version may lie in any range.
    proved: what the proofs of the patch have shown on a tree. It counts if this is the tree, see `_shown`.
    """
    for name in (entry.distribution, *entry.needs):
        if name not in environment.installed:
            return Match("not-installed", f"{name} is not installed")
    installed = environment.installed[entry.distribution]
    versions = environment.versions
    unclear = environment.installed.keys() - versions.keys() - {entry.distribution}
    beside = [environment.installed[name] for name in entry.needs if name != entry.distribution]
    release = " beside ".join(i.release for i in (installed, *beside))
    bodies = Bodies(entry, environment, matrix)
    rule = entry.rule_for(versions, unclear)
    candidate = None if rule is None or rule.variant is None else entry.variants[rule.variant]
    note = f" ({rule.note})" if rule is not None and rule.note else ""

    if proved is not None and proved.verdict == TRIAL:
        if not proved.variant:
            return Match("drifted", "left out of this trial", cause="disproved")
        variant = entry.variants[proved.variant]
        return _with(bodies, variant, f"tried on {release}", proved.dropped)
    if proved is not None and proved.verdict in (FIXED, NOT_FIXED):
        # Known bodies as well: the tree may differ in code that the patch neither binds nor reads.
        shown = _shown(bodies, proved, release)
        if shown is not None:
            return shown
    if candidate is not None:
        found = bodies.of(candidate)
        if bodies.all_known(candidate.name, found):
            known = "its function matches" if len(found) == 1 else f"all {len(found)} functions match"
            reason = f"{release} needs it{note}; {known} a known release"
            return Match("apply", reason, candidate.name, found)
    # A known body decides even if the version says otherwise or says nothing: nightlies, commits, vendor forks.
    possible = [variant for variant in entry.variants.values() if entry.possible(variant.name, versions, unclear)]
    for variant in (variant for variant in entry.most_bodies_first if variant in possible):
        found = bodies.of(variant)
        if bodies.all_known(variant.name, found):
            those = "the body of {} is that" if len(found) == 1 else f"all {len(found)} bodies of {{}} are those"
            reason = f"{those.format(release)} of variant {variant.name}; its version does not matter"
            return Match("apply", reason, variant.name, found)
    right = _like_a_right_release(bodies, rule, release, agreeing=True)
    if right is not None:
        return right
    if rule is not None and rule.variant is None and all(map(bodies.missing, entry.targets)):
        lacks = f"{release} {_WORDS[rule.right]}: it has none of the patch's targets{note}"
        return Match(rule.right, lacks)
    for said in _evidence(bodies, proved):
        shown = _shown(bodies, said, release)
        # In part, a variant of other versions was seen to help, and is not the one that this version gets.
        if shown is not None and not (shown.dropped and candidate and shown.variant != candidate.name):
            return shown
    # The defect may come of code that the patch neither binds nor reads, so proofs about the same bodies come first.
    right = _like_a_right_release(bodies, rule, release, agreeing=False)
    if right is not None:
        return right
    # A version that is said to be right, with unknown bodies: the defect may still be there.
    unshown = rule is not None and rule.variant is None
    choices = possible or list(entry.variants.values())
    if rule is not None and unshown:
        # Another distribution may say that these very bodies need no patch. Its releases are known by their versions.
        whole = [v for v in entry.variants.values() if bodies.all_known(v.name, bodies.of(v))]
        others = rule.ranges.keys() - {entry.distribution}
        if whole and others and all(environment.installed[o].raw in matrix.supported.get(o, ()) for o in others):
            return Match(rule.right, f"{release} {_WORDS[rule.right]}{note}", None, bodies.here())
        choices = whole or choices
    if candidate is None and not unshown and not (possible and _beyond(entry, versions, matrix)):
        return Match("out-of-range", f"{release} lies outside the ranges of this patch, and its bodies are unknown")
    variant = bodies.nearest(choices, candidate or choices[-1])
    unknown = bodies.unknown(variant.name, bodies.of(variant))
    if unknown and not unshown and unknown.keys() <= variant.skippable.keys() and set(variant.targets) - unknown.keys():
        return _in_part(release, bodies, variant, unknown)
    drift = _drifted(release, bodies, variant, unknown)
    if rule is not None and unshown:
        drift = _unshown(drift, rule, release)
    if proved is not None and proved.verdict == CANNOT_RUN and _is_about(bodies, proved):
        return replace(drift, reason=f"{drift.reason}; its proofs show nothing on this tree ({proved.shown})")
    return drift


def _is_about(bodies: Bodies, proved: Proved) -> bool:
    """Whether the proofs ran on the very bodies that are here."""
    variant = None if proved.variant is None else bodies.entry.variants.get(proved.variant)
    return (variant is not None or proved.variant is None) and bodies.digest(variant) == proved.bodies


def _evidence(bodies: Bodies, proved: Proved | None) -> list[Proved]:
    """What proofs have shown, here first, and then on known trees.

    They speak of bodies that no release has. So a plan on a release does not read what they have shown. If another
    distribution decides as well, they say nothing: it may be another release beside these bodies.
    """
    here = [] if proved is None or proved.verdict == CANNOT_RUN else [proved]
    entry = bodies.entry
    released = any(bodies.all_known(variant.name, bodies.of(variant)) for variant in entry.variants.values())
    speak = bodies.matrix.shipped and entry.stands_alone and not released and bodies.here()
    return [*here, *(shipped_evidence(entry.id) if speak else [])]


def _shown(bodies: Bodies, proved: Proved, release: str) -> Match | None:
    """What the proofs have shown, if they ran on the very bodies that are here. None: they ran on others."""
    if not _is_about(bodies, proved):
        return None
    when = f"{proved.date}, {proved.shown}" if proved.shown else proved.date
    tree = f"the same bodies in {proved.where}" if proved.trees else "this tree"
    if proved.verdict == RIGHT_ON_STOCK:
        return Match(UPSTREAM, f"{release} is right without it: proved on {tree} ({when})", None, bodies.here())
    if proved.verdict == LACKING:
        return Match(NOT_NEEDED, f"{release} {_WORDS[NOT_NEEDED]}: seen on {tree} ({when})", None, bodies.here())
    if proved.variant is None:  # it was wrong, and no variant fits it
        return None
    variant = bodies.entry.variants[proved.variant]
    found = bodies.of(variant)
    if proved.verdict == FIXED:
        return _with(bodies, variant, f"proved on {tree} ({when})", proved.dropped)
    unknown = bodies.unknown(variant.name, found)
    reason = f"its proofs fail on {tree} ({when})"
    return Match("drifted", reason, variant.name, found, unknown or dict.fromkeys(found, reason), cause="disproved")


def _with(bodies: Bodies, variant: Variant, reason: str, left: Sequence[str]) -> Match:
    """The variant, without the targets that it can do without and that are missing, or in `left`."""
    found = bodies.of(variant)
    dropped = {t: "its proofs do not run it" for t in variant.skippable if t in left}
    dropped |= {t: str(bodies.problems[t]) for t in variant.skippable if found.get(t) == GONE}
    return Match("apply", reason, variant.name, found, dropped=dropped)


def _like_a_right_release(bodies: Bodies, rule: Rule | None, release: str, agreeing: bool) -> Match | None:
    """The release or commit that is right without the patch and has the same bodies. None if there is none.

    agreeing: a release counts only if the version says the same. The version of a commit says nothing.
    """
    entry, matrix = bodies.entry, bodies.matrix
    commits = matrix.commits.get(entry.distribution, {})
    for name, alike in matrix.right_like(entry.id, bodies.found, bodies.missing):
        state = matrix.wanted(entry.id, name) or UPSTREAM
        agrees = rule is not None and rule.gives == state
        if agrees or name in commits or not agreeing:
            note = f" ({rule.note})" if rule is not None and agrees and rule.note else ""
            shown = matrix.shown(entry.distribution, name)
            return Match(state, f"{release} {_WORDS[state]}: its bodies are those of {shown}{note}", None, alike)
    return None


_WORDS = {UPSTREAM: "has fixed this itself", NOT_NEEDED: "lacks what this patch fixes"}


def _unshown(found: Match, rule: Rule, release: str) -> Match:
    """A drift, of a release whose version is one of those that are right. The version alone shows nothing."""
    note = f" ({rule.note})" if rule.note else ""
    said = "fixed" if rule.gives == UPSTREAM else "without the defect"
    reason = f"it is not known whether {release} needs this patch: its version is one of those {said}{note}, but "
    why = found.reason if found.drifted else "nothing in its sources shows it"
    cause = "unshown" if found.cause in ("", "changed", "missing") else found.cause
    return replace(found, reason=reason + why, signatures_fit=False, cause=cause)


def _in_part(release: str, bodies: Bodies, variant: Variant, unknown: Mapping[str, str]) -> Match:
    """Bodies that are not known, of which the patch can do without each: it holds without them."""
    found = bodies.of(variant)
    names = ", ".join(split_target(target)[1] for target in unknown)
    reason = f"{release} needs it (variant {variant.name}); it does without {names}, of which the body is not known"
    fits = all(found[target] != GONE for target in unknown) and bodies.signatures_fit(variant, found)
    return Match("apply", reason, variant.name, found, dropped=unknown, signatures_fit=fits)


def _drifted(release: str, bodies: Bodies, variant: Variant, unknown: Mapping[str, str]) -> Match:
    found = bodies.of(variant)
    if not unknown:  # all bodies are those of a variant, and another distribution has to say whether it is needed
        return Match("drifted", "", variant.name, found)
    first, why = next(iter(unknown.items()))
    relied = "" if first in variant.targets else ", which the patch relies on"
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    reason = f"{release} differs at {first}{relied}{more}: {why}"
    cause = bodies.problems[first].cause if found[first] == GONE else "changed"
    if cause == "changed" and not bodies.pins:
        cause, reason = "unpinned", f"no release is pinned, so no body of {release} is known"
    fits = bodies.signatures_fit(variant, found)
    return Match("drifted", reason, variant.name, found, unknown, signatures_fit=fits, cause=cause)
