"""Step 2, match: the version names a candidate variant, and its bodies decide."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from packaging.version import Version

from shim._errors import SourceError
from shim._matrix.model import NOT_NEEDED, RIGHT, UPSTREAM, Matrix, PatchEntry, Pin, Rule, Variant
from shim._planning.contract import breach, shows
from shim._planning.evidence import CANNOT_RUN, DECIDED, FIXED, OTHERWISE, TRIAL, Proved
from shim._planning.evidence import RIGHT as RIGHT_ON_STOCK
from shim._record import computed_once
from shim._releases.detect import Environment
from shim._releases.fingerprint import fingerprint, signature_part, split_target

__all__ = ["GONE", "Match", "all_known", "fingerprints_of", "keeps_contract", "match", "variants_by_likeness"]

GONE = ""  # stands for the fingerprint of a body that cannot be found or read


@dataclass(frozen=True)
class Match:
    """What the installed sources mean for one patch.

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


class _Bodies:
    """The bodies of one patch: known ones from the pins, installed ones from the sources."""

    def __init__(self, entry: PatchEntry, environment: Environment, matrix: Matrix) -> None:
        self.entry = entry
        self.environment = environment
        self.matrix = matrix
        self.problems: dict[str, SourceError] = {}
        self._known: dict[str, Mapping[str, Collection[str]]] = {}
        self._found: dict[tuple[str, str | None, bool], str] = {}
        self._breaches: dict[tuple[str, str], str] = {}

    @computed_once
    def pins(self) -> list[tuple[str, Pin]]:
        """The pins with their releases. A plan on a known release needs only `known`."""
        return list(self.matrix.known(self.entry.id))

    def known(self, variant: str) -> Mapping[str, Collection[str]]:
        """The known bodies of a variant, by target."""
        if variant not in self._known:
            self._known[variant] = self.matrix.known_bodies(self.entry.id, variant)
        return self._known[variant]

    def found(self, target: str, inherits: str | None = None, may_be_missing: bool = False) -> str:
        key = (target, inherits, may_be_missing)
        if key not in self._found:
            try:
                self._found[key] = fingerprint(self.environment.sources, target, inherits, may_be_missing)
            except SourceError as error:
                self.problems.setdefault(target, error)
                self._found[key] = GONE
        return self._found[key]

    def of(self, variant: Variant) -> dict[str, str]:
        return {t: self.found(t, variant.inherits(t), t in variant.may_be_missing) for t in variant.bodies}

    def unknown(self, name: str, bodies: Mapping[str, str]) -> dict[str, str]:
        """The bodies that no pin of this variant knows, each with the reason."""
        known = self.known(name)
        return {
            target: str(self.problems[target]) if value == GONE else self._elsewhere(target, value)
            for target, value in bodies.items()
            if value not in known.get(target, ())
        }

    def _elsewhere(self, target: str, value: str) -> str:
        """The reason why a body is not known: which pinned release has it with another variant, if any."""
        having = [(release, pin) for release, pin in self.pins if pin.fingerprints.get(target) == value]
        if not having:
            return "its body is not that of any pinned release"
        distribution, of_release = self.entry.distribution, dict(having)
        release = self.matrix.in_order(distribution, of_release)[-1]
        variant = of_release[release].variant
        has = f"which has variant {variant}" if variant else "which needs no patch"
        return f"its body is that of {distribution} {self.matrix.shown(distribution, release)}, {has}"

    def all_known(self, name: str, bodies: Mapping[str, str]) -> bool:
        known = self.known(name)
        return bool(bodies) and all(value in known.get(target, ()) for target, value in bodies.items())

    def breach(self, variant: Variant, target: str) -> str | None:
        """How a body breaks its contract, in words. "" where it keeps it.

        None where it has none, so that it must be known, or where it is not found as the variant expects it.
        """
        if target not in variant.needs or self.found_in(variant, target) == GONE:
            return None
        key = (variant.name, target)
        if key not in self._breaches:
            body = variant.inherits(target) or target
            self._breaches[key] = breach(self.environment.sources, body, variant.needs[target])
        return self._breaches[key]

    def standing(self, variant: Variant) -> tuple[dict[str, str], dict[str, str]]:
        """The bodies that are not known with this variant, with the reasons: those that keep contracts, and others."""
        kept: dict[str, str] = {}
        others: dict[str, str] = {}
        for target, why in self.unknown(variant.name, self.of(variant)).items():
            (kept if self.breach(variant, target) == "" else others)[target] = why
        return kept, others

    def found_in(self, variant: Variant, target: str) -> str:
        return self.found(target, variant.inherits(target), target in variant.may_be_missing)

    def signatures_fit(self, variant: Variant, bodies: Mapping[str, str], kept: Collection[str]) -> bool:
        """Whether every target keeps its contract, or has the signature that it has in some pinned release."""
        known = self.known(variant.name)
        return all(
            target in kept
            or any(signature_part(bodies[target]) == signature_part(value) for value in known.get(target, ()))
            for target in variant.targets
        )

    def nearest(self, variants: list[Variant], to: Variant) -> Variant:
        """The variant with the fewest broken bodies, then with the most known ones for its size, then nearest to `to`.

        Variants of which half is broken come last, by their shares: one of few bodies has few broken ones anywhere.
        """
        order = list(self.entry.variants)

        def distance(variant: Variant) -> tuple[bool, float, float, int]:
            kept, broken = self.standing(variant)
            apart, count = abs(order.index(variant.name) - order.index(to.name)), len(variant.bodies)
            share, unknown = len(broken) / count, (len(broken) + len(kept)) / count
            return (True, share, unknown, apart) if share >= 0.5 else (False, len(broken), unknown, apart)

        return min(variants, key=distance)

    def missing(self, target: str) -> bool:
        """Whether there is no such body. A file that cannot be read may hold one."""
        return self.found(target) == GONE and self.problems[target].cause == "missing"


def _beyond(entry: PatchEntry, versions: Mapping[str, Version], matrix: Matrix) -> bool:
    """Whether the release is newer than all supported ones, or of unknown version: nobody knows what it needs."""
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
    bodies = _Bodies(entry, environment, matrix)
    rule = entry.rule_for(versions, unclear)
    candidate = None if rule is None or rule.variant is None else entry.variants[rule.variant]
    note = f" ({rule.note})" if rule is not None and rule.note else ""

    if proved is not None and proved.verdict == TRIAL:
        if not proved.variant:
            return Match("drifted", "left out of this trial", cause="disproved")
        variant = entry.variants[proved.variant]
        return _with(bodies, variant, f"tried on {release}")
    if candidate is not None:
        found = bodies.of(candidate)
        if bodies.all_known(candidate.name, found):
            known = "its body is" if len(found) == 1 else f"all {len(found)} bodies are"
            reason = f"{release} needs it{note}; {known} known"
            return Match("apply", reason, candidate.name, found)
    # A known body decides even where the version says otherwise or says nothing: nightlies, commits, vendor forks.
    possible = [variant for variant in entry.variants.values() if entry.possible(variant.name, versions, unclear)]
    for variant in possible:
        found = bodies.of(variant)
        if bodies.all_known(variant.name, found):
            those = "the body of {} is that" if len(found) == 1 else f"all {len(found)} bodies of {{}} are those"
            reason = f"{those.format(release)} of variant {variant.name}, whatever its version"
            return Match("apply", reason, variant.name, found)
    shown = None if proved is None else _shown(bodies, proved, release)
    if shown is not None:
        return shown
    right = _right(bodies, rule, release)
    if right is not None:
        return right
    # A version that is said to be right, with bodies that nobody has seen: the defect may still be there.
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


def _shown(bodies: _Bodies, proved: Proved, release: str) -> Match | None:
    """What the proofs have shown, if they ran on the very bodies that are here. None: nothing, or of other bodies."""
    entry = bodies.entry
    when = f"{proved.date}, {proved.shown}" if proved.shown else proved.date
    if proved.verdict == RIGHT_ON_STOCK or (proved.verdict == CANNOT_RUN and proved.variant is None):
        found = fingerprints_of(entry, None, bodies.environment, bodies.matrix)
        if found != proved.fingerprints:
            return None
        if proved.verdict == CANNOT_RUN:
            return _otherwise(bodies, proved, None, found)
        return Match(UPSTREAM, f"{release} is right without it: proved on this tree ({when})", None, found)
    variant = entry.variants.get(proved.variant or "")
    found = {} if variant is None else bodies.of(variant)
    if variant is None or found != proved.fingerprints:
        return None
    if proved.verdict == CANNOT_RUN:
        return _otherwise(bodies, proved, variant, found)
    if proved.verdict == FIXED:
        return _with(bodies, variant, f"proved on this tree ({when})")
    unknown = bodies.unknown(variant.name, found)
    reason = f"its proofs fail on this tree ({when})"
    return Match("drifted", reason, variant.name, found, unknown or dict.fromkeys(found, reason), cause="disproved")


def _with(bodies: _Bodies, variant: Variant, reason: str) -> Match:
    """The variant, without the targets that are missing and that it can do without."""
    found = bodies.of(variant)
    dropped = {t: str(bodies.problems[t]) for t in variant.skippable if found.get(t) == GONE}
    return Match("apply", reason, variant.name, found, dropped=dropped)


def _otherwise(bodies: _Bodies, proved: Proved, variant: Variant | None, found: Mapping[str, str]) -> Match | None:
    """What was decided about these bodies without proofs."""
    state, reason, cause = (proved.otherwise.get(name, "") for name in OTHERWISE)
    if state not in DECIDED or (variant is None) != (state in RIGHT):
        return None
    reason += f"; its proofs show nothing on this tree ({proved.shown})"
    drifted = dict.fromkeys(found, reason) if state == "drifted" else {}
    if state == "apply" and variant is not None:
        return replace(_with(bodies, variant, reason), cause=cause)
    return Match(state, reason, None if variant is None else variant.name, found, drifted, cause=cause)


def variants_by_likeness(entry: PatchEntry, environment: Environment, matrix: Matrix) -> list[Variant]:
    """The variants whose targets are all here, the most likely one first: by the rules, then by their bodies."""
    bodies = _Bodies(entry, environment, matrix)
    versions = environment.versions
    rule = entry.rule_for(versions, environment.installed.keys() - versions.keys() - {entry.distribution})
    candidate = None if rule is None or rule.variant is None else entry.variants[rule.variant]
    left = [
        v
        for v in entry.variants.values()
        if all(bodies.found_in(v, target) != GONE or target in v.skippable for target in v.targets)
    ]
    found: list[Variant] = []
    while left:
        found.append(bodies.nearest(left, candidate or left[-1]))
        left.remove(found[-1])
    return found


def fingerprints_of(
    entry: PatchEntry, variant: Variant | None, environment: Environment, matrix: Matrix
) -> dict[str, str]:
    """The bodies of a variant, GONE for one that is missing. None: all bodies of the patch that are here."""
    bodies = _Bodies(entry, environment, matrix)
    if variant is not None:
        return bodies.of(variant)
    return {target: value for target in entry.bodies if (value := bodies.found(target)) != GONE}


def keeps_contract(entry: PatchEntry, variant: Variant, target: str, environment: Environment, matrix: Matrix) -> bool:
    """Whether the body of one of a variant's targets or reads keeps its contract."""
    return _Bodies(entry, environment, matrix).breach(variant, target) == ""


def all_known(entry: PatchEntry, matrix: Matrix, variant: str | None, fingerprints: Mapping[str, str]) -> bool:
    """Whether each of these bodies was seen in a release or commit with this variant (None: that is right)."""
    known = matrix.known_bodies(entry.id, variant or UPSTREAM)
    return bool(fingerprints) and all(value in known.get(target, ()) for target, value in fingerprints.items())


def _right(bodies: _Bodies, rule: Rule | None, release: str) -> Match | None:
    """What shows that the release is right without the patch: bodies that are known to be, or a sign. None: nothing."""
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
    if rule is not None and rule.gives == NOT_NEEDED and all(map(bodies.missing, entry.targets)):
        note = f" ({rule.note})" if rule.note else ""
        return Match(NOT_NEEDED, f"{release} {_WORDS[NOT_NEEDED]}: it has nothing of what the patch binds{note}")
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


def _kept(release: str, bodies: _Bodies, variant: Variant, kept: Mapping[str, str]) -> Match:
    """Unknown bodies that keep their contracts: the patch holds."""
    names = ", ".join(split_target(target)[1] for target in kept)
    unknown, holds = ("body", "contract holds") if len(kept) == 1 else ("bodies", "contracts hold")
    others = len(variant.bodies) - len(kept)
    rest = f"; the other {others} {'body is' if others == 1 else 'bodies are'} known" if others else ""
    reason = f"{unknown} unknown, {holds}: {names}{rest} ({release}, variant {variant.name})"
    return Match("apply", reason, variant.name, bodies.of(variant), kept=kept, signatures_fit=True)


def _in_part(
    release: str, bodies: _Bodies, variant: Variant, kept: Mapping[str, str], broken: Mapping[str, str]
) -> Match:
    """Bodies that drifted, of which the patch can do without each: it holds without them."""
    found = bodies.of(variant)
    names = ", ".join(split_target(target)[1] for target in broken)
    reason = f"{release} needs it (variant {variant.name}); it does without {names}, of which the body is not known"
    fits = all(found[target] != GONE for target in broken) and bodies.signatures_fit(variant, found, kept)
    return Match("apply", reason, variant.name, found, kept=kept, dropped=broken, signatures_fit=fits)


def _drifted(release: str, bodies: _Bodies, variant: Variant) -> Match:
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
