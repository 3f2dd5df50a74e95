"""Lost features, as a plan names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shim._planning.decision import Decision
from shim._record import record
from shim._releases.detect import Environment

__all__ = ["Losses", "LostFeature"]


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
