"""The decision about one patch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from shim._matrix.model import Variant
from shim._record import computed_once, record
from shim._releases.fingerprint import split_target

__all__ = ["Decision"]


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

    @property
    def wanted(self) -> bool:
        return self.action == "apply"

    @property
    def variant(self) -> str | None:
        """The name of the variant."""
        return None if self.wiring is None else self.wiring.name

    @property
    def targets(self) -> tuple[str, ...]:
        return () if self.wiring is None else self.wiring.targets

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
        return frozenset(split_target(target)[0] for target in self.targets)

    @computed_once
    def content(self) -> tuple[str, str | None, str, tuple[str, ...]]:
        """What its factories are made from: patch, variant, options and targets."""
        return self.id, self.variant, repr(sorted(self.options.items())), self.targets

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
