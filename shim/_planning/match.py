"""Step 2, match: the version names a candidate variant, and its bodies decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from packaging.version import Version

from shim._matrix.model import NOT_NEEDED, RIGHT, UPSTREAM, Matrix, PatchEntry, Rule, Variant
from shim._planning.bodies import GONE, Bodies
from shim._planning.contract import shows
from shim._planning.evidence import CANNOT_RUN, DECIDED, FIXED, NOT_FIXED, OTHERWISE, TRIAL, Proved, shipped_evidence
from shim._planning.evidence import RIGHT as RIGHT_ON_STOCK
from shim._record import record
from shim._releases.detect import Environment
from shim._releases.fingerprint import split_target

__all__ = ["Match", "match"]


@record
class Match:
    """The meaning of the installed sources for one patch.

    state: ``apply``, ``upstream``, ``not-needed``, ``not-installed``, ``out-of-range`` or ``drifted``.
    fingerprints: those of the bodies of `variant`.
    drifted: the bodies that are neither known with this variant nor keep its contract, each with the reason.
    kept: the bodies that are not known, but keep their contracts, each with the reason why it is not known.
    breaches: how those of `drifted` that have a contract break it.
    dropped: targets that the patch does without, because their bodies are neither known nor keep a contract, each with
        the reason.
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
    kept: Mapping[str, str] = field(default_factory=dict)
    breaches: Mapping[str, str] = field(default_factory=dict)
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
    release = " beside ".join(f"{i.distribution} {i.raw or 'of unknown version'}" for i in (installed, *beside))
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
    right = _like_a_right_release(bodies, rule, release)
    if right is not None:
        return right
    if rule is not None and rule.gives == NOT_NEEDED and all(map(bodies.missing, entry.targets)):
        lacks = f"{release} {_WORDS[NOT_NEEDED]}: it has none of the patch's targets{note}"
        return Match(NOT_NEEDED, lacks)
    for said in _evidence(bodies, proved):
        shown = _shown(bodies, said, release)
        # In part, a variant of other versions was seen to help, and is not the one that this version gets.
        if shown is not None and not (shown.dropped and candidate and shown.variant != candidate.name):
            return shown
    right = _seen_to_be_right(bodies, release)
    if right is not None:
        return right
    # A version that is said to be right, with unknown bodies: the defect may still be there.
    unshown = rule is not None and rule.variant is None
    choices = possible or list(entry.variants.values())
    if unshown:  # another distribution may decide that these very bodies need no patch
        choices = [v for v in entry.variants.values() if bodies.all_known(v.name, bodies.of(v))] or choices
    if candidate is None and not unshown and not (possible and _beyond(entry, versions, matrix)):
        return Match("out-of-range", f"{release} lies outside the ranges of this patch, and its bodies are unknown")
    variant = bodies.nearest(choices, candidate or choices[-1])
    kept, broken = bodies.standing(variant)
    if kept and not broken:
        return _kept(release, bodies, variant, kept)
    if broken and not unshown and broken.keys() <= variant.skippable.keys() and set(variant.targets) - broken.keys():
        return _in_part(release, bodies, variant, kept, broken)
    drift = _drifted(release, bodies, variant)
    return _unshown(drift, rule, release) if rule is not None and unshown else drift


def _evidence(bodies: Bodies, proved: Proved | None) -> list[Proved]:
    """What proofs have shown, here first. If they could not run here, what they have shown on known trees first.

    They speak of bodies that no release has. So a plan on a release does not read what they have shown. If another
    distribution decides as well, they say nothing: it may be another release beside these bodies.
    """
    here = [] if proved is None else [proved]
    entry = bodies.entry
    released = any(bodies.all_known(variant.name, bodies.of(variant)) for variant in entry.variants.values())
    speak = bodies.matrix.shipped and entry.stands_alone and not released and bodies.here()
    known = shipped_evidence(entry.id) if speak else []
    return [*known, *here] if proved is not None and proved.verdict == CANNOT_RUN else [*here, *known]


def _shown(bodies: Bodies, proved: Proved, release: str) -> Match | None:
    """What the proofs have shown, if they ran on the very bodies that are here. None: nothing, or of other bodies."""
    entry = bodies.entry
    when = f"{proved.date}, {proved.shown}" if proved.shown else proved.date
    tree = f"the same bodies in {proved.where}" if proved.trees else "this tree"
    if proved.verdict == RIGHT_ON_STOCK or (proved.verdict == CANNOT_RUN and proved.variant is None):
        if bodies.digest(None) != proved.bodies:
            return None
        found = bodies.here()
        if proved.verdict == CANNOT_RUN:
            return _otherwise(bodies, proved, None, found)
        return Match(UPSTREAM, f"{release} is right without it: proved on {tree} ({when})", None, found)
    variant = entry.variants.get(proved.variant or "")
    if variant is None or bodies.digest(variant) != proved.bodies:
        return None
    found = bodies.of(variant)
    if proved.verdict == CANNOT_RUN:
        return _otherwise(bodies, proved, variant, found)
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


def _otherwise(bodies: Bodies, proved: Proved, variant: Variant | None, found: Mapping[str, str]) -> Match | None:
    """What was decided about these bodies without proofs."""
    state, reason, cause, left = (proved.otherwise.get(name, "") for name in OTHERWISE)
    if state not in DECIDED or (variant is None) != (state in RIGHT):
        return None
    reason += f"; its proofs show nothing on this tree ({proved.shown})"
    drifted = dict.fromkeys(found, reason) if state == "drifted" else {}
    if state == "apply" and variant is not None:
        dropped = dict.fromkeys((target for target in left.split() if target in variant.skippable), reason)
        return Match(state, reason, variant.name, found, dropped=dropped, cause=cause)
    return Match(state, reason, None if variant is None else variant.name, found, drifted, cause=cause)


def _like_a_right_release(bodies: Bodies, rule: Rule | None, release: str) -> Match | None:
    """The release or tag that is right without the patch and has the same bodies. None if there is none."""
    entry, matrix = bodies.entry, bodies.matrix
    like = matrix.right_like(entry.id, bodies.found, bodies.missing)
    state = UPSTREAM if like is None else matrix.wanted(entry.id, like[0]) or UPSTREAM
    # Where the version says otherwise, the defect may come of code that the patch neither binds nor reads.
    agrees = rule is not None and rule.gives == state
    if like is not None and (agrees or not (entry.fixed if state == UPSTREAM else entry.lacking)):
        name, alike = like
        note = f" ({rule.note})" if rule is not None and rule.variant is None and rule.note else ""
        shown = matrix.shown(entry.distribution, name)
        return Match(state, f"{release} {_WORDS[state]}: its bodies are those of {shown}{note}", None, alike)
    return None


def _seen_to_be_right(bodies: Bodies, release: str) -> Match | None:
    """The sign that the release is right without the patch. None if there is none."""
    entry = bodies.entry
    sources = bodies.environment.sources
    for state, signs in ((UPSTREAM, entry.fixed), (NOT_NEEDED, entry.lacking)):
        sign = next((sign for sign in signs if shows(sources, sign)), None)
        if sign is not None:
            where = ", ".join(place.target for place in sign.places)
            return Match(state, f"{release} {_WORDS[state]}: {sign.note} (seen at {where})")
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


def _kept(release: str, bodies: Bodies, variant: Variant, kept: Mapping[str, str]) -> Match:
    """Unknown bodies that keep their contracts: the patch holds."""
    names = ", ".join(split_target(target)[1] for target in kept)
    unknown, holds = ("body", "contract holds") if len(kept) == 1 else ("bodies", "contracts hold")
    others = len(variant.bodies) - len(kept)
    rest = f"; the other {others} {'body is' if others == 1 else 'bodies are'} known" if others else ""
    reason = f"{unknown} unknown, {holds}: {names}{rest} ({release}, variant {variant.name})"
    return Match("apply", reason, variant.name, bodies.of(variant), kept=kept, signatures_fit=True)


def _in_part(
    release: str, bodies: Bodies, variant: Variant, kept: Mapping[str, str], broken: Mapping[str, str]
) -> Match:
    """Bodies that drifted, of which the patch can do without each: it holds without them."""
    found = bodies.of(variant)
    names = ", ".join(split_target(target)[1] for target in broken)
    reason = f"{release} needs it (variant {variant.name}); it does without {names}, of which the body is not known"
    fits = all(found[target] != GONE for target in broken) and bodies.signatures_fit(variant, found, kept)
    return Match("apply", reason, variant.name, found, kept=kept, dropped=broken, signatures_fit=fits)


def _drifted(release: str, bodies: Bodies, variant: Variant) -> Match:
    found = bodies.of(variant)
    kept, drifted = bodies.standing(variant)
    if not drifted:  # all bodies are those of a variant, and another distribution has to say whether it is needed
        return Match("drifted", "", variant.name, found)
    first, why = next(iter(drifted.items()))
    breaches = {target: said for target in drifted if (said := bodies.breach(variant, target))}
    relied = "" if first in variant.targets else ", which the patch relies on"
    more = f" (and {len(drifted) - 1} more)" if len(drifted) > 1 else ""
    broken = f", and it breaks its contract: {breaches[first]}" if first in breaches else ""
    reason = f"{release} differs at {first}{relied}{more}: {why}{broken}"
    cause = bodies.problems[first].cause if found[first] == GONE else "changed"
    if cause == "changed" and not bodies.pins:
        cause, reason = "unpinned", f"no release is pinned, so no body of {release} is known"
    return Match(
        "drifted",
        reason,
        variant.name,
        found,
        drifted,
        kept,
        breaches,
        signatures_fit=bodies.signatures_fit(variant, found, kept),
        cause=cause,
    )
