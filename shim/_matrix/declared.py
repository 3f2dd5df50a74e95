"""What a matrix declares besides patches: their options, and source states between releases that shim is pinned to."""

from __future__ import annotations

import math
from typing import Any

from shim._printing.printable import one_of
from shim._record import record

__all__ = ["BOUNDS", "MAIN", "NOT_NEEDED", "RIGHT", "TYPES", "UPSTREAM", "Commit", "Declared"]

TYPES = {"bool": bool, "int": int, "float": float, "str": str}
NAMES = {"bool": "True or False", "int": "an integer", "float": "a finite number", "str": "text"}
BOUNDS = {"minimum": "at least", "above": "above", "maximum": "at most"}


@record
class Declared:
    """One option. Where the default is None, a caller may also give None.

    The values `minimum` and `maximum` are allowed, the value `above` is not.
    """

    name: str
    default: Any
    type: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    switch: bool = False  # the patch does nothing until a switch is true

    @property
    def takes(self) -> str:
        """The values that the option takes, in words."""
        if self.choices:
            what = "one of " + ", ".join(self.choices)
        else:
            limits = [
                f"{words} {bound}" for name, words in BOUNDS.items() if (bound := getattr(self, name)) is not None
            ]
            what = ", ".join([NAMES[self.type], *limits])
        return what if self.default is not None else f"{what}, or None"

    def checked(self, value: Any) -> Any:
        """`value` as the patch gets it. A ValueError says what the value must be."""
        if value is None and self.default is None:
            return None
        if self.type == "float" and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        if not self._allows(value):
            takes = one_of(value, self.choices) if self.choices else self.takes
            raise ValueError(f"is {value!r}; it must be {takes}")
        return value

    def _allows(self, value: Any) -> bool:
        # To Python a bool is an int, but hardly anybody means it as one.
        if not isinstance(value, TYPES[self.type]) or (isinstance(value, bool) and self.type != "bool"):
            return False
        if self.choices and value not in self.choices:
            return False
        if not isinstance(value, (int, float)):
            return True
        return math.isfinite(value) and (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )


MAIN = "main"  # the branch of tomorrow's release
# Stands for a variant if a release is right without the patch: it has fixed the defect, or never had it.
UPSTREAM = "upstream"
NOT_NEEDED = "not-needed"
RIGHT = (UPSTREAM, NOT_NEEDED)


@record
class Commit:
    """One commit of a repository.

    commit: its hash, 40 digits. `name` is the beginning of it.
    version: of the sources, a pre-release if they come before the release.
    date: the day it was committed (UTC).    of: the branch or tag that it is of, and who pins it.
    """

    name: str
    commit: str
    version: str
    date: str
    of: str

    @property
    def branch(self) -> str:
        return self.of.partition(",")[0].strip()

    @property
    def tagged(self) -> bool:
        """Whether it is a release that the package index has no wheel of."""
        return self.branch.startswith("tag ")

    def __str__(self) -> str:
        return f"commit {self.name} ({self.branch} of {self.date})"
