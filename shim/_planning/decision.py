"""What a plan says: the decision about a patch, and the features that a pair of releases loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol

from shim._matrix.model import Variant
from shim._record import computed_once, record
from shim._releases.detect import Environment
from shim._releases.fingerprint import split_target

__all__ = ["Decision", "Losses", "LostFeature"]


@record
class Decision:
    """The decision about one patch. `action` is ``apply``, or the state that says why not."""

    id: str
    kind: str
    action: str
    reason: str
    wiring: Variant | None = None  # the variant to bind
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    # Of a conflict: the decision that holds again without it.
    without_conflict: Decision | None = field(default=None, compare=False, repr=False)
    # Targets left to a foreign object, with that object in words ("": it says that it keeps what the patch does).
    skipped: Mapping[str, str] = field(default_factory=dict)
    # Targets of the variant that are not bound, because their bodies are not known, with the reasons.
    dropped: Mapping[str, str] = field(default_factory=dict)
    # Whether it binds a body that is not known, because on_drift="apply" asked for it.
    unseen: bool = False

    @computed_once
    def wanted(self) -> bool:
        return self.action == "apply"

    @property
    def variant(self) -> str | None:
        """The name of the variant."""
        return None if self.wiring is None else self.wiring.name

    @computed_once
    def targets(self) -> tuple[str, ...]:
        return () if self.wiring is None else self.wiring.targets

    @computed_once
    def placed(self) -> tuple[tuple[str, str], ...]:
        """Each target, and its module."""
        return tuple((target, split_target(target)[0]) for target in self.targets)

    @computed_once
    def reached_by(self) -> Mapping[str, tuple[str, ...]]:
        """See Variant."""
        return {} if self.wiring is None else self.wiring.reached_by

    @property
    def optional(self) -> frozenset[str]:
        """Targets that the patch binds but does not wait for."""
        return frozenset() if self.wiring is None else self.wiring.optional

    @property
    def may_be_missing(self) -> frozenset[str]:
        """Targets that upstream may lack."""
        return frozenset() if self.wiring is None else self.wiring.may_be_missing

    @property
    def no_aliases(self) -> frozenset[str]:
        """Targets whose aliases shim does not bind."""
        return frozenset() if self.wiring is None else self.wiring.no_aliases

    @property
    def parts_left(self) -> tuple[str, ...]:
        """A sentence for each of `dropped`, with the defect that remains."""
        skippable = {} if self.wiring is None else self.wiring.skippable
        return tuple(f"{t} is left as it is, since its body is not known: {skippable[t]}" for t in self.dropped)

    @computed_once
    def modules(self) -> frozenset[str]:
        """The modules of the targets."""
        return frozenset(module for _, module in self.placed)

    @computed_once
    def content(self) -> str:
        """What its factories are made from: patch, variant, options and targets. A string, which is hashed once."""
        return repr((self.id, self.variant, sorted(self.options.items()), self.targets))

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "action": self.action,
            "reason": self.reason,
            "variant": self.variant,
            "targets": list(self.targets),
            "fingerprints": dict(self.fingerprints),
            "options": dict(self.options),
            "remedy": self.remedy,
            "left": dict(self.skipped),
            "dropped": dict(self.dropped),
        }


@record
class LostFeature:
    """A name that the TE release lacks or has in another shape, and what megatron-core loses by that.

    remedy: "alias" (the same object is in another place), "adapter" (the object has another shape), "none" (this TE
        release cannot give it), or "" if it has not been judged yet.
    patch: the id of the patch that fixes it.    fixed: whether this plan applies that patch.
    """

    name: str
    lost: str
    remedy: str
    patch: str = ""
    fixed: bool = False
    why_not: str = ""  # why this plan does not apply `patch`
    comes_with: str = ""  # the next TE release that has the name
    places: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "lost": self.lost,
            "remedy": self.remedy,
            "patch": self.patch or None,
            "fixed": self.fixed,
            "outcome": self.outcome,
            "comes_with": self.comes_with or None,
            "places": list(self.places),
        }

    @property
    def verdict(self) -> str:
        return "fixed" if self.fixed else "lost"

    @property
    def outcome(self) -> str:
        """The outcome for the feature, in a few words."""
        if self.fixed:
            return f"fixed by {self.patch}"
        if self.patch:
            return f"{self.patch} would fix it, but {self.why_not}"
        comes = f", comes with Transformer Engine {self.comes_with}" if self.comes_with else ""
        return f"cannot be had with this release{comes}" if self.remedy == "none" else f"not fixed{comes}"

    def __str__(self) -> str:
        return f"{self.name}: {self.lost}; {self.outcome}"


class Losses(Protocol):
    """Knows the lost features of a pair of releases: shim._te.features, which `_api` passes in."""

    def lost_features(
        self, environment: Environment, decisions: Mapping[str, Decision]
    ) -> tuple[LostFeature, ...] | None: ...

    def pair_is_known(self, environment: Environment) -> bool | None: ...
