"""The bodies of a patch: the known ones from the pins, the installed ones from the sources, and how both compare."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shim._errors import SourceError
from shim._matrix.model import Matrix, PatchEntry, Pin, Variant
from shim._planning.evidence import digest_of_bodies
from shim._record import computed_once
from shim._releases.detect import Environment
from shim._releases.fingerprint import fingerprint, signature_part

__all__ = ["GONE", "Bodies"]

GONE = ""  # stands for the fingerprint of a body that cannot be found or read


class Bodies:
    """The bodies of one patch: known ones from the pins, installed ones from the sources."""

    def __init__(self, entry: PatchEntry, environment: Environment, matrix: Matrix) -> None:
        self.entry = entry
        self.environment = environment
        self.matrix = matrix
        self.problems: dict[str, SourceError] = {}
        self._known: dict[str, Mapping[str, Collection[str]]] = {}
        self._found: dict[tuple[str, str | None, bool], str] = {}
        self._digests: dict[str | None, str] = {}

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

    def digest(self, variant: Variant | None) -> str:
        """The digest of the bodies of a variant, or of all bodies that the release has, as evidence names them."""
        name = None if variant is None else variant.name
        if name not in self._digests:
            self._digests[name] = digest_of_bodies(self.here() if variant is None else self.of(variant))
        return self._digests[name]

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

    def found_in(self, variant: Variant, target: str) -> str:
        return self.found(target, variant.inherits(target), target in variant.may_be_missing)

    def signatures_fit(self, variant: Variant, bodies: Mapping[str, str]) -> bool:
        """Whether every target has the signature that it has in some pinned release."""
        known = self.known(variant.name)
        return all(
            any(signature_part(bodies[target]) == signature_part(value) for value in known.get(target, ()))
            for target in variant.targets
        )

    def nearest(self, variants: list[Variant], to: Variant) -> Variant:
        """The variant with the fewest unknown bodies, then with the most known ones for its size, then nearest to `to`.

        Variants of which half is unknown come last, by their shares: one of few bodies has few unknown ones anywhere.
        """
        order = list(self.entry.variants)

        def distance(variant: Variant) -> tuple[bool, float, float, int]:
            unknown = len(self.unknown(variant.name, self.of(variant)))
            apart, share = abs(order.index(variant.name) - order.index(to.name)), unknown / len(variant.bodies)
            return (True, share, 0, apart) if share >= 0.5 else (False, unknown, share, apart)

        return min(variants, key=distance)

    def missing(self, target: str) -> bool:
        """Whether there is no such body. A file that cannot be read may hold one."""
        return self.found(target) == GONE and self.problems[target].cause == "missing"

    def here(self) -> dict[str, str]:
        """All bodies of the patch, of any variant, that the release has."""
        return {target: value for target in self.entry.bodies if (value := self.found(target)) != GONE}

    def likely(self) -> list[Variant]:
        """The variants whose targets are here, or can be done without, the likeliest first.

        That is the one by the rules; of the others the nearest by bodies.
        """
        versions = self.environment.versions
        unclear = self.environment.installed.keys() - versions.keys() - {self.entry.distribution}
        rule = self.entry.rule_for(versions, unclear)
        candidate = None if rule is None or rule.variant is None else self.entry.variants[rule.variant]
        left = [
            variant
            for variant in self.entry.variants.values()
            if all(self.found_in(variant, target) != GONE or target in variant.skippable for target in variant.targets)
        ]
        found: list[Variant] = []
        if candidate in left:
            found.append(candidate)
            left.remove(candidate)
        while left:
            found.append(self.nearest(left, candidate or left[-1]))
            left.remove(found[-1])
        return found
