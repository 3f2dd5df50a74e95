"""Step 2, match: versions name a candidate variant, the bodies of its targets decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import Version

from shim._detect import Environment
from shim._errors import SourceError
from shim._fingerprint import fingerprint, signature_part
from shim._matrix import Matrix, PatchEntry, Variant

__all__ = ["Match", "match"]

GONE = ""  # stands for the fingerprint of a target that cannot be found or read


@dataclass(frozen=True)
class Match:
    """What installed sources mean for one patch.

    `state` is one of ``apply``, ``upstream``, ``not-installed``, ``out-of-range``, ``drifted``. `fingerprints` are
    those of the bodies of `variant`, `drifted` the ones among them that no pinned release has, with the reason.
    """

    state: str
    reason: str
    variant: str | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    drifted: Mapping[str, str] = field(default_factory=dict)
    signatures_fit: bool = False


class _Bodies:
    """The bodies a patch may stand on, known ones from the pins and installed ones from the sources."""

    def __init__(self, entry: PatchEntry, environment: Environment, matrix: Matrix) -> None:
        self.environment = environment
        self.known: dict[str | None, dict[str, set[str]]] = {}  # by variant and target, of any pinned release
        for _, pin in matrix.known(entry.id):
            bodies = self.known.setdefault(pin.variant, {})
            for target, value in pin.fingerprints.items():
                bodies.setdefault(target, set()).add(value)
        self.problems: dict[str, str] = {}
        self._found: dict[tuple[str, str | None, bool], str] = {}

    def found(self, target: str, inherits: str | None = None, added: bool = False) -> str:
        key = (target, inherits, added)
        if key not in self._found:
            try:
                self._found[key] = fingerprint(self.environment.sources, target, inherits, added)
            except SourceError as error:
                self.problems[target] = str(error)
                self._found[key] = GONE
        return self._found[key]

    def of(self, variant: Variant) -> dict[str, str]:
        return {t: self.found(t, variant.inherits(t), t in variant.added) for t in variant.bodies}

    def unknown(self, name: str, bodies: Mapping[str, str]) -> dict[str, str]:
        """The bodies that no pinned release with this variant has, each with the reason."""
        known = self.known.get(name, {})
        return {
            target: self.problems[target] if value == GONE else "its body is not that of any pinned release"
            for target, value in bodies.items()
            if value not in known.get(target, ())
        }

    def all_known(self, name: str, bodies: Mapping[str, str]) -> bool:
        return bool(bodies) and not self.unknown(name, bodies)

    def signatures_fit(self, variant: Variant, bodies: Mapping[str, str]) -> bool:
        """Whether every target can still be called as in some pinned release of the variant."""
        known = self.known.get(variant.name, {})
        return all(
            any(signature_part(bodies[target]) == signature_part(value) for value in known.get(target, ()))
            for target in variant.targets
        )


def _beyond(entry: PatchEntry, versions: Mapping[str, Version], matrix: Matrix) -> bool:
    """Whether the release is newer than all that the matrix speaks of, so that nobody knows what it needs."""
    supported = matrix.supported.get(entry.distribution)
    version = versions.get(entry.distribution)
    return version is None or not supported or version > max(map(Version, supported))


def match(entry: PatchEntry, environment: Environment, matrix: Matrix) -> Match:
    """Return which variant of `entry` the installed sources call for, and why."""
    for name in (entry.distribution, *entry.needs):
        if name not in environment.installed:
            return Match("not-installed", f"{name} is not installed")
    installed = environment.installed[entry.distribution]
    versions = {n: i.version for n, i in environment.installed.items() if i.version is not None}
    release = f"{entry.distribution} {installed.raw or 'of unknown version'}"
    bodies = _Bodies(entry, environment, matrix)
    rule = entry.rule_for(versions)
    candidate = None if rule is None or rule.variant is None else entry.variants[rule.variant]
    note = f" ({rule.note})" if rule is not None and rule.note else ""

    if candidate is not None:
        found = bodies.of(candidate)
        if bodies.all_known(candidate.name, found):
            reason = f"{release} needs it{note}; all {len(found)} bodies are known"
            return Match("apply", reason, candidate.name, found)
    # A known body decides even where the version says otherwise or says nothing: nightlies, commits, vendor forks.
    for variant in entry.variants.values():
        if variant is candidate or not entry.possible(variant.name, versions):
            continue
        found = bodies.of(variant)
        if bodies.all_known(variant.name, found):
            reason = f"whatever the version of {release}, all {len(found)} bodies are those of variant {variant.name}"
            return Match("apply", reason, variant.name, found)
    for pinned, pin in matrix.known(entry.id):
        if pin.variant is None and all(bodies.found(target) == value for target, value in pin.fingerprints.items()):
            reason = f"{release} needs no patch: its bodies are those of {pinned}"
            reason += note if candidate is None else ""
            return Match("upstream", reason, None, pin.fingerprints)
    if rule is not None and rule.variant is None:
        return Match("upstream", f"{release} has it already{note}")
    if candidate is None:
        names = [t for v in entry.variants.values() for t in v.targets]
        if not _beyond(entry, versions, matrix) or all(bodies.found(target) == GONE for target in names):
            return Match("out-of-range", f"{release} lies outside the ranges of this patch, and its bodies are unknown")
        candidate = list(entry.variants.values())[-1]
    found = bodies.of(candidate)
    drifted = bodies.unknown(candidate.name, found)
    first, why = next(iter(drifted.items()))
    relied = "" if first in candidate.targets else ", which the patch relies on"
    more = f" (and {len(drifted) - 1} more)" if len(drifted) > 1 else ""
    return Match(
        "drifted",
        f"{release} differs at {first}{relied}{more}: {why}",
        candidate.name,
        found,
        drifted,
        bodies.signatures_fit(candidate, found),
    )
