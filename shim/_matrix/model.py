"""The matrix as data: patches, variants, rules, pins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from packaging.version import Version

from shim._errors import MatrixError
from shim._matrix.declared import NOT_NEEDED, RIGHT, UPSTREAM, Commit, Declared
from shim._record import computed_once, record
from shim._releases.detect import PATCHED
from shim._releases.fingerprint import fingerprint
from shim._releases.sources import Sources
from shim._releases.versions import in_range

__all__ = [
    "CHANGES",
    "Commit",
    "DISTRIBUTIONS",
    "Decided",
    "KINDS",
    "NOT_NEEDED",
    "RIGHT",
    "UPSTREAM",
    "Matrix",
    "PatchEntry",
    "Pin",
    "Pinned",
    "Rule",
    "SYMPTOMS",
    "Variant",
]


KINDS = ("correctness", "compat", "performance", "feature")


CHANGES = ("nothing", "rounding", "values")


# The worst first. Numbers that are wrong without a word come before a run that ends.
SYMPTOMS = ("silent", "crash", "hang", "memory", "missing")


DISTRIBUTIONS = PATCHED  # ranges are over them


@record
class Decided:
    """A person's decision about a body that decides nothing alone: a release with it gets `gives`.

    gives: a variant, UPSTREAM or NOT_NEEDED.    note: why, in words.
    """

    target: str
    body: str
    gives: str
    note: str


@record
class Variant:
    """One way in which a patch is wired: the targets it binds and the names it depends on, as ``module:qualname``.

    inherited: maps a target on a subclass to the definition that the subclass inherits.
    optional: targets that the patch binds but does not wait for. Not every job imports their modules.
    may_be_missing: targets that a release may lack. Their factories get MISSING if the name is absent. revert()
        removes the names again.
    no_aliases: targets whose object upstream uses under other names for other purposes. shim binds no alias of them.
    wraps_any: targets whose factory holds around any function that takes the same calls: also around a foreign one.
    skippable: targets that the patch can do without, if a foreign object stands there, with what stays wrong
        then.
    reached_by: maps a target or a read to the functions and methods through which a call reaches it. A foreign
        function there, or an override of the method, may hide the patch.
    """

    name: str
    targets: tuple[str, ...]
    depends_on: tuple[str, ...] = ()
    inherited: Mapping[str, str] = None  # type: ignore[assignment]
    optional: frozenset[str] = frozenset()
    may_be_missing: frozenset[str] = frozenset()
    no_aliases: frozenset[str] = frozenset()
    wraps_any: frozenset[str] = frozenset()
    skippable: Mapping[str, str] = field(default_factory=dict)
    reached_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def bodies(self) -> tuple[str, ...]:
        """All names that are fingerprinted, targets first."""
        return (*self.targets, *self.depends_on)

    def without(self, targets: Collection[str]) -> Variant:
        """The variant that does without these targets."""
        return replace(self, targets=tuple(target for target in self.targets if target not in targets))

    def inherits(self, target: str) -> str | None:
        """The definition that `target` inherits, whose body counts. None if it has another definition."""
        return (self.inherited or {}).get(target)

    def fingerprint(self, sources: Sources, target: str) -> str:
        """The fingerprint of one of `bodies` in `sources`. SourceError if it is not what the variant expects."""
        return fingerprint(sources, target, self.inherits(target), target in self.may_be_missing)


@record
class Rule:
    """Ranges over distributions. When all hold, the release gets `variant`.

    Where `variant` is None, the release is right without the patch, and `right` says how: UPSTREAM or NOT_NEEDED.
    """

    ranges: Mapping[str, str]
    variant: str | None
    note: str = ""
    line: int = 0
    right: str = UPSTREAM

    @property
    def gives(self) -> str:
        """The variant, or how the release is right."""
        return self.variant or self.right

    def holds(self, versions: Mapping[str, Version], but: Collection[str] = ()) -> bool:
        """Whether all ranges hold. Ranges over the distributions in `but` do not count."""
        ranges = [(name, spec) for name, spec in self.ranges.items() if name not in but]
        return all(name in versions and in_range(versions[name], spec) for name, spec in ranges)


Pinned = Mapping[str, Mapping[str, Sequence[str]]]  # of one variant: target -> body -> releases


@record
class Pin:
    """One patch on one release, as `shim pin` measured it: the variant (None: right) and the fingerprints."""

    variant: str | None
    fingerprints: Mapping[str, str]


@record
class PatchEntry:
    """One patch as the matrix describes it. `options` are the defaults of the options in `declared`."""

    id: str
    summary: str
    kind: str
    changes: str
    distribution: str
    module: str
    variants: Mapping[str, Variant]
    rules: tuple[Rule, ...]
    references: tuple[str, ...] = ()
    met_by: tuple[str, ...] = ()  # who has met the defect, or carries a workaround
    concerns: tuple[tuple[str, ...], ...] = ()  # alternatives, each of words that hold together: see concerns.WORDS
    # Its inputs: "own", of the module's config or the call; "process", global.
    per_model: Mapping[str, str] = field(default_factory=dict)
    # Patches with the same target that this one wraps, because it stands later: id -> why that is right.
    outside_of: Mapping[str, str] = field(default_factory=dict)
    cost: str = ""  # what the fix takes beyond stock; "" for nothing
    symptom: str = ""  # the worst of what goes wrong, one of SYMPTOMS; "" if nobody said it
    without: str = ""  # what goes wrong in a release that needs the patch and does not get it
    effects: Mapping[str, str] = None  # type: ignore[assignment]  # of what `changes` says: the kind -> what it concerns
    delete_when: str = ""
    options: Mapping[str, Any] = None  # type: ignore[assignment]
    declared: Mapping[str, Declared] = None  # type: ignore[assignment]
    before: tuple[str, ...] = ()  # modules before whose code the patch begins something: see Resource.begin
    decided: tuple[Decided, ...] = ()
    pairs: tuple[Rule, ...] = ()  # releases that are wrong together, each note says how; they decide nothing
    line: int = 0
    probe: tuple[str, ...] = ()  # the methods in whose place the module's `probe` tries a foreign function

    def off_by(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The switches that are all off with these options, so that the patch does nothing; () if it does something."""
        switches = tuple(name for name, option in (self.declared or {}).items() if option.switch)
        return () if any(options.get(name) for name in switches) else switches

    def rule_for(self, versions: Mapping[str, Version], but: Collection[str] = ()) -> Rule | None:
        """The first rule that holds, see Rule.holds."""
        return next((rule for rule in self.rules if rule.holds(versions, but)), None)

    def pinned_rule(self, version: Version) -> Rule | None:
        """The rule that a release of the patch's distribution is pinned by, whatever is installed beside it."""
        here = self.distribution
        own = [r for r in self.rules if here not in r.ranges or in_range(version, r.ranges[here])]
        variants = {rule.variant for rule in own} - {None}
        if len(variants) > 1:
            what = f"{self.id}: {', '.join(sorted(map(str, variants)))} are all variants of {here} {version}"
            raise MatrixError(f"{what}; another distribution may only decide between one variant and none")
        return next((rule for rule in own if rule.variant), next(iter(own), None))

    @property
    def needs(self) -> tuple[str, ...]:
        """The distributions that every rule has a range over. Where one is not installed, there is nothing to patch."""
        return tuple(name for name in DISTRIBUTIONS if all(name in rule.ranges for rule in self.rules))

    @property
    def stands_alone(self) -> bool:
        """Whether the bodies of its distribution decide, whatever is installed beside it."""
        return all(rule.ranges.keys() <= {self.distribution} for rule in self.rules)

    def possible(self, variant: str, versions: Mapping[str, Version], but: Collection[str] = ()) -> bool:
        """Whether a rule gives `variant` to some release of the patch's distribution beside what else is installed.

        A variant that no rule gives is one of commits, and goes with anything.
        """
        but = {self.distribution, *but}
        if all(rule.variant != variant for rule in self.rules):
            return True
        return any(rule.variant == variant and rule.holds(versions, but) for rule in self.rules)

    @property
    def most_bodies_first(self) -> list[Variant]:
        """The variants; one with more bodies fixes more, and those of another may be a part of its bodies.

        Of two with the same bodies the later one is first: what has no range yet is mostly new.
        """
        return sorted(self.variants.values(), key=lambda variant: len(variant.bodies))[::-1]

    @property
    def bodies(self) -> tuple[str, ...]:
        """Bodies of all variants, each once."""
        return tuple(dict.fromkeys(b for variant in self.variants.values() for b in variant.bodies))

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of all variants, each once."""
        return tuple(dict.fromkeys(t for variant in self.variants.values() for t in variant.targets))


def _only(pinned: Pinned, releases: Collection[str]) -> Pinned:
    """The bodies that one of these releases has."""
    found = {
        target: {body: names for body, having in bodies.items() if (names := [n for n in having if n in releases])}
        for target, bodies in pinned.items()
    }
    return {target: bodies for target, bodies in found.items() if bodies}


@record
class Matrix:
    """The whole matrix. `pinned[patch id][variant]` holds the pinned bodies with their releases.

    `commits` holds the commits of each distribution by name, oldest first. Each release or commit that has pins is
    spoken of by its name. `names`, `version` and `in_order` take both. A name of a commit is no version.

    `bodies` holds the same bodies without releases, as text with spaces between, by patch, variant and target. Only the
    fast form of the matrix fills it.

    `content` is "" for the shipped matrix. For another one it is a hash over the file and its pins.
    """

    path: str
    patches: Mapping[str, PatchEntry]
    supported: Mapping[str, tuple[str, ...]]
    pinned: Mapping[str, Mapping[str, Pinned]]
    content: str = ""
    bodies: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict, compare=False, repr=False)
    commits: Mapping[str, Mapping[str, Commit]] = field(default_factory=dict)

    @property
    def shipped(self) -> bool:
        return not self.content

    def names(self, distribution: str) -> tuple[str, ...]:
        """The names of all that is pinned of a distribution: its supported releases, then its commits."""
        return (*self.supported.get(distribution, ()), *self.commits.get(distribution, ()))

    def version(self, distribution: str, name: str) -> Version:
        """The version of a release, or the version that the sources of a commit have."""
        commit = self.commits.get(distribution, {}).get(name)
        return Version(name if commit is None else commit.version)

    def in_order(self, distribution: str, names: Iterable[str]) -> list[str]:
        """Releases and commits by version. Of one version, commits come before the release, by their dates."""
        commits = self.commits.get(distribution, {})

        def place(name: str) -> tuple[Version, bool, str]:
            return self.version(distribution, name), name not in commits, commits[name].date if name in commits else ""

        return sorted(names, key=place)

    def shown(self, distribution: str, name: str) -> str:
        """A release or a commit in a sentence: "0.19.2", "commit d98e8a64dd (main of 2026-08-22)"."""
        return str(self.commits.get(distribution, {}).get(name, name))

    def wanted(self, patch: str, name: str) -> str | None:
        """The variant of a release or commit, UPSTREAM or NOT_NEEDED. None if the patch has no pin there.

        The rules say it of a release. Of a commit its pins do: the rules for its version may be wrong there.
        """
        entry = self.patches[patch]
        rule = entry.pinned_rule(self.version(entry.distribution, name))
        given = None if rule is None else rule.gives
        commit = self.commits.get(entry.distribution, {}).get(name)
        if commit is None:
            return given
        pinned = next((variant for variant, names in self._pinned_names(patch) if name in names), None)
        # A release that only a tag has may be right because it has none of the bodies.
        right = pinned == UPSTREAM or (pinned is None and commit.tagged)
        return given if right and given in RIGHT else pinned

    def _pinned_names(self, patch: str) -> Iterator[tuple[str, set[str]]]:
        """The variants that a patch is pinned with, and UPSTREAM, each with its releases and commits."""
        for variant, targets in self.pinned.get(patch, {}).items():
            yield variant, {name for bodies in targets.values() for names in bodies.values() for name in names}

    @computed_once
    def released(self) -> Matrix:
        """The same matrix without what is known of commits."""
        pinned = {
            id: {name: _only(targets, self.supported[self.patches[id].distribution]) for name, targets in given.items()}
            for id, given in self.pinned.items()
        }
        return replace(self, pinned=pinned, bodies={}, commits={})

    def pinned_as(self, patch: str, name: str) -> str | None:
        """The key of its pin on a release or commit: a variant, or UPSTREAM for all that is right without the patch."""
        wanted = self.wanted(patch, name)
        return UPSTREAM if wanted in RIGHT else wanted

    def known_bodies(self, patch: str, variant: str) -> Mapping[str, Collection[str]]:
        """The pinned bodies of a variant, by target."""
        if self.bodies:
            return {target: text.split() for target, text in self.bodies.get(patch, {}).get(variant, {}).items()}
        return self.pinned.get(patch, {}).get(variant, {})

    def right_like(
        self, patch: str, found: Callable[[str], str], missing: Callable[[str], bool]
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """The releases and commits that are right without the patch and have the same bodies, with these bodies.

        All bodies of the patch count: `found` has the release's bodies, and lacks those that it lacks.
        """
        right = self.pinned.get(patch, {}).get(UPSTREAM, {})
        entry = self.patches[patch]
        having: dict[str, dict[str, str]] = {}
        for target, bodies in right.items():
            for body, releases in bodies.items():
                for release in releases:
                    having.setdefault(release, {})[target] = body
        for name in self.names(entry.distribution):
            known = having.get(name)
            if (
                known
                and all(found(target) == body for target, body in known.items())
                and all(target in known or missing(target) for target in entry.bodies)
            ):
                yield name, known

    def known(self, patch: str) -> Iterable[tuple[str, Pin]]:
        """Every pin of a patch with the release or commit that has it, in the order of `names`."""
        found: dict[str, tuple[str | None, dict[str, str]]] = {}
        for variant, targets in self.pinned.get(patch, {}).items():
            for target, bodies in targets.items():
                for body, releases in bodies.items():
                    for release in releases:
                        found.setdefault(release, (None if variant == UPSTREAM else variant, {}))[1][target] = body
        for release in self.names(self.patches[patch].distribution):
            if release in found:
                yield release, Pin(*found[release])

    @computed_once
    def pins(self) -> Mapping[str, Mapping[str, Mapping[str, Pin]]]:
        """``pins[distribution][name][patch id]``, for callers that go through releases. A plan uses `pinned`."""
        found: dict[str, dict[str, dict[str, Pin]]] = {
            distribution: {name: {} for name in self.names(distribution)}
            for distribution in {**self.supported, **self.commits}
        }
        for id, entry in self.patches.items():
            for release, pin in self.known(id):
                found[entry.distribution][release][id] = pin
        return found
