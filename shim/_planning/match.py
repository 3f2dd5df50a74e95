"""Step 2, match: the version names a candidate variant, and its bodies decide."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from packaging.version import Version

from shim._errors import SourceError
from shim._matrix.model import Matrix, PatchEntry, Pin, Variant
from shim._record import EMPTY, Record
from shim._releases.detect import Environment
from shim._releases.fingerprint import fingerprint, signature_part

__all__ = ["GONE", "Match", "match"]

GONE = ""  # stands for the fingerprint of a body that cannot be found or read


class Match(Record):
    """What the installed sources mean for one patch.

    state: ``apply``, ``upstream``, ``not-installed``, ``out-of-range`` or ``drifted``.
    fingerprints: those of the bodies of `variant`.
    drifted: the bodies that no pin of this variant knows, each with the reason.
    signatures_fit: whether every target can still be called as in some pinned release of the variant.
    cause: why the first of `drifted` is not known: "changed", "unpinned", or the cause of its SourceError.
    """

    state: str
    reason: str
    variant: str | None = None
    fingerprints: Mapping[str, str] = EMPTY
    drifted: Mapping[str, str] = EMPTY
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

    @cached_property
    def pins(self) -> list[tuple[str, Pin]]:
        """The pins with their releases. A plan on a known release needs only `known`."""
        return list(self.matrix.known(self.entry.id))

    def known(self, variant: str) -> Mapping[str, Collection[str]]:
        """The known bodies of a variant, by target."""
        if variant not in self._known:
            self._known[variant] = self.matrix.known_bodies(self.entry.id, variant)
        return self._known[variant]

    def found(self, target: str, inherits: str | None = None, added: bool = False) -> str:
        key = (target, inherits, added)
        if key not in self._found:
            try:
                self._found[key] = fingerprint(self.environment.sources, target, inherits, added)
            except SourceError as error:
                self.problems.setdefault(target, error)
                self._found[key] = GONE
        return self._found[key]

    def of(self, variant: Variant) -> dict[str, str]:
        return {t: self.found(t, variant.inherits(t), t in variant.added) for t in variant.bodies}

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
        release, pin = max(having, key=lambda item: Version(item[0]))
        has = f"which has variant {pin.variant}" if pin.variant else "which needs no patch"
        return f"its body is that of {self.entry.distribution} {release}, {has}"

    def all_known(self, name: str, bodies: Mapping[str, str]) -> bool:
        known = self.known(name)
        return bool(bodies) and all(value in known.get(target, ()) for target, value in bodies.items())

    def are_those_of(self, pin: Pin) -> bool:
        return all(self.found(target) == value for target, value in pin.fingerprints.items())

    def signatures_fit(self, variant: Variant, bodies: Mapping[str, str]) -> bool:
        """Whether every target has the signature that it has in some pinned release of the variant."""
        known = self.known(variant.name)
        return all(
            any(signature_part(bodies[target]) == signature_part(value) for value in known.get(target, ()))
            for target in variant.targets
        )

    def nearest(self, variants: list[Variant], to: Variant) -> Variant:
        """The variant with the largest share of known bodies. Among equals the one nearest to `to` in the matrix."""
        order = list(self.entry.variants)

        def distance(variant: Variant) -> tuple[float, int]:
            bodies = self.of(variant)
            unknown = len(self.unknown(variant.name, bodies)) / len(bodies)
            return unknown, abs(order.index(variant.name) - order.index(to.name))

        return min(variants, key=distance)

    def all_absent(self, variants: list[Variant]) -> bool:
        """Whether all targets of these variants are missing. A file that cannot be read may hold one."""
        return all(
            self.found(target, variant.inherits(target)) == GONE and self.problems[target].cause == "missing"
            for variant in variants
            for target in variant.targets
        )


def _beyond(entry: PatchEntry, versions: Mapping[str, Version], matrix: Matrix) -> bool:
    """Whether the release is newer than all supported ones, or of unknown version: nobody knows what it needs."""
    supported = matrix.supported.get(entry.distribution)
    version = versions.get(entry.distribution)
    return version is None or not supported or version > max(map(Version, supported))


def match(entry: PatchEntry, environment: Environment, matrix: Matrix) -> Match:
    """Return which variant of `entry` the installed release needs, and why.

    A distribution of unknown version may lie in any range.
    """
    for name in (entry.distribution, *entry.needs):
        if name not in environment.installed:
            return Match("not-installed", f"{name} is not installed")
    installed = environment.installed[entry.distribution]
    versions = {n: i.version for n, i in environment.installed.items() if i.version is not None}
    unclear = environment.installed.keys() - versions.keys() - {entry.distribution}
    beside = [environment.installed[name] for name in entry.needs if name != entry.distribution]
    release = " beside ".join(f"{i.distribution} {i.raw or 'of unknown version'}" for i in (installed, *beside))
    bodies = _Bodies(entry, environment, matrix)
    rule = entry.rule_for(versions, unclear)
    candidate = None if rule is None or rule.variant is None else entry.variants[rule.variant]
    note = f" ({rule.note})" if rule is not None and rule.note else ""

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
    for pinned, pin in bodies.pins:
        if pin.variant is None and bodies.are_those_of(pin):
            reason = f"{release} needs no patch: its bodies are those of {pinned}"
            reason += note if candidate is None else ""
            return Match("upstream", reason, None, pin.fingerprints)
    if rule is not None and rule.variant is None:
        return Match("upstream", f"{release} has it already{note}")
    if candidate is None:
        outside = not possible or not _beyond(entry, versions, matrix)
        # A release of unknown version is never too old or too new, so missing targets do not put it out of range.
        if outside or (installed.version is not None and bodies.all_absent(possible)):
            return Match("out-of-range", f"{release} lies outside the ranges of this patch, and its bodies are unknown")
    return _drifted(release, bodies, bodies.nearest(possible, candidate or possible[-1]))


def _drifted(release: str, bodies: _Bodies, variant: Variant) -> Match:
    found = bodies.of(variant)
    drifted = bodies.unknown(variant.name, found)
    first, why = next(iter(drifted.items()))
    relied = "" if first in variant.targets else ", which the patch relies on"
    more = f" (and {len(drifted) - 1} more)" if len(drifted) > 1 else ""
    reason = f"{release} differs at {first}{relied}{more}: {why}"
    cause = bodies.problems[first].cause if found[first] == GONE else "changed"
    if cause == "changed" and not bodies.pins:
        cause, reason = "unpinned", f"no release is pinned, so no body of {release} is known"
    return Match(
        "drifted",
        reason,
        variant.name,
        found,
        drifted,
        bodies.signatures_fit(variant, found),
        cause,
    )
