"""The matrix as data: patches, variants, rules, pins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from packaging.version import Version

from shim._errors import MatrixError
from shim._matrix.declared import Declared
from shim._record import EMPTY, Record
from shim._releases.fingerprint import fingerprint
from shim._releases.sources import Sources
from shim._releases.versions import in_range

__all__ = [
    "CHANGES",
    "DISTRIBUTIONS",
    "KINDS",
    "UPSTREAM",
    "Matrix",
    "PatchEntry",
    "Pin",
    "Pinned",
    "Rule",
    "StandIn",
    "Variable",
    "Variant",
]


KINDS = ("correctness", "compat", "performance", "feature")


CHANGES = ("nothing", "rounding", "values")


DISTRIBUTIONS = ("megatron-core", "transformer-engine")  # what patches are of, and ranges over


class Variant(Record):
    """One way a patch is wired: the targets it binds and the bodies it relies on, as ``module:qualname``.

    `inherited` maps a target that is bound on a subclass to the definition it inherits. `optional` targets are bound
    like all others, but not waited for: their modules are imported only by those who use them. `added` targets are
    names that releases lack, or define only where something else is installed: their factories get MISSING where there
    is nothing, and revert() takes away what they gave. `alone` targets hold what upstream has elsewhere for others too:
    they are bound under this name and no other.
    """

    name: str
    targets: tuple[str, ...]
    reads: tuple[str, ...] = ()
    inherited: Mapping[str, str] = None  # type: ignore[assignment]
    optional: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()

    @property
    def bodies(self) -> tuple[str, ...]:
        """All that is fingerprinted, targets first."""
        return (*self.targets, *self.reads)

    def inherits(self, target: str) -> str | None:
        """The definition that `target` inherits, and whose body counts for it; None where it has its own."""
        return (self.inherited or {}).get(target)

    def fingerprint(self, sources: Sources, target: str) -> str:
        """Of one of `bodies` in `sources`; SourceError where it is not what the variant takes it for."""
        return fingerprint(sources, target, self.inherits(target), target in self.added)


class Rule(Record):
    """Ranges over distributions that, when all hold, give a variant (None: the release needs no patch)."""

    ranges: Mapping[str, str]
    variant: str | None
    note: str = ""
    line: int = 0

    def holds(self, versions: Mapping[str, Version], but: Collection[str] = ()) -> bool:
        """Whether all ranges hold; those over the distributions `but` do not count."""
        ranges = [(name, spec) for name, spec in self.ranges.items() if name not in but]
        return all(name in versions and in_range(versions[name], spec) for name, spec in ranges)


class Variable(Record):
    """An environment variable that only counts if it is set before a package is imported.

    `ranges` says for which releases, all that are named; `option` is the patch's option that has shim set it, and
    `without` what goes wrong where it is not set.
    """

    name: str
    value: str
    before: str
    option: str
    without: str
    ranges: Mapping[str, str]

    def concerns(self, versions: Mapping[str, Version]) -> bool:
        return all(name in versions and in_range(versions[name], spec) for name, spec in self.ranges.items())

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class StandIn(Record):
    """A top-level package that may be missing, and the modules whose code may run without it."""

    package: str
    modules: tuple[str, ...]


Pinned = Mapping[str, Mapping[str, Sequence[str]]]  # of one variant: target -> body -> releases
UPSTREAM = "upstream"  # in the place of a variant: releases that are right


class Pin(Record):
    """What `shim pin` measured for one patch on one release: the variant (None: upstream) and its fingerprints."""

    variant: str | None
    fingerprints: Mapping[str, str]


class PatchEntry(Record):
    """One patch as the matrix describes it; `options` are the defaults of `declared`."""

    id: str
    summary: str
    kind: str
    changes: str
    distribution: str
    module: str
    variants: Mapping[str, Variant]
    rules: tuple[Rule, ...]
    references: tuple[str, ...] = ()
    without: str = ""  # what goes wrong in a release that needs the patch and does not get it
    delete_when: str = ""
    options: Mapping[str, Any] = None  # type: ignore[assignment]
    declared: Mapping[str, Declared] = None  # type: ignore[assignment]
    variables: tuple[Variable, ...] = ()
    stand_ins: tuple[StandIn, ...] = ()
    line: int = 0

    def rule_for(self, versions: Mapping[str, Version], but: Collection[str] = ()) -> Rule | None:
        """The first rule that holds; see Rule.holds."""
        return next((rule for rule in self.rules if rule.holds(versions, but)), None)

    def pinned_rule(self, version: Version) -> Rule | None:
        """What a release of the patch's own distribution is pinned with, whatever else is installed beside it."""
        here = self.distribution
        own = [r for r in self.rules if here not in r.ranges or in_range(version, r.ranges[here])]
        variants = {rule.variant for rule in own} - {None}
        if len(variants) > 1:
            what = f"{self.id}: {', '.join(sorted(map(str, variants)))} are all variants of {here} {version}"
            raise MatrixError(f"{what}; what else is installed may only decide between one variant and none")
        return next((rule for rule in own if rule.variant), next(iter(own), None))

    @property
    def needs(self) -> tuple[str, ...]:
        """The distributions that every rule speaks of: without one of them there is nothing to patch."""
        return tuple(name for name in DISTRIBUTIONS if all(name in rule.ranges for rule in self.rules))

    def possible(self, variant: str, versions: Mapping[str, Version], but: Collection[str] = ()) -> bool:
        """Whether a rule gives `variant` on some release of the distribution, beside what else is installed."""
        but = {self.distribution, *but}
        return any(rule.variant == variant and rule.holds(versions, but) for rule in self.rules)

    @property
    def bodies(self) -> tuple[str, ...]:
        """Bodies of all variants, each once."""
        return tuple(dict.fromkeys(b for variant in self.variants.values() for b in variant.bodies))

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of all variants, each once."""
        return tuple(dict.fromkeys(t for variant in self.variants.values() for t in variant.targets))


class Matrix(Record):
    """The whole matrix; `pinned[patch id][variant]` are the bodies that releases were seen with.

    `bodies` says the same without the releases, by patch, variant and target, as text with spaces between; a matrix may
    do without, and then it is made of `pinned`.
    `content` is a hash over the bytes of the file and of its pins where it is not the matrix that ships with shim,
    else "".
    """

    path: str
    patches: Mapping[str, PatchEntry]
    supported: Mapping[str, tuple[str, ...]]
    pinned: Mapping[str, Mapping[str, Pinned]]
    content: str = ""
    bodies: Mapping[str, Mapping[str, Mapping[str, str]]] = EMPTY

    _aside = ("bodies",)

    @property
    def shipped(self) -> bool:
        return not self.content

    def known_bodies(self, patch: str, variant: str) -> Mapping[str, Collection[str]]:
        """By target, the bodies that releases with this variant were seen with."""
        if self.bodies:
            return {target: text.split() for target, text in self.bodies.get(patch, {}).get(variant, {}).items()}
        return self.pinned.get(patch, {}).get(variant, {})

    def known(self, patch: str) -> Iterable[tuple[str, Pin]]:
        """Every pin of a patch with its release, in the order of the supported list."""
        found: dict[str, tuple[str | None, dict[str, str]]] = {}
        for variant, targets in self.pinned.get(patch, {}).items():
            for target, bodies in targets.items():
                for body, releases in bodies.items():
                    for release in releases:
                        found.setdefault(release, (None if variant == UPSTREAM else variant, {}))[1][target] = body
        for release in self.supported.get(self.patches[patch].distribution, ()):
            if release in found:
                yield release, Pin(*found[release])

    @cached_property
    def pins(self) -> Mapping[str, Mapping[str, Mapping[str, Pin]]]:
        """``pins[distribution][release][patch id]``, for whoever goes through releases; to decide takes `pinned`."""
        found: dict[str, dict[str, dict[str, Pin]]] = {
            distribution: {release: {} for release in releases} for distribution, releases in self.supported.items()
        }
        for id, entry in self.patches.items():
            for release, pin in self.known(id):
                found[entry.distribution][release][id] = pin
        return found
