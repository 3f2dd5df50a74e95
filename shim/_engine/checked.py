"""Which models were checked last, and what trying their overrides has shown."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shim._engine.overrides import Verdict

__all__ = ["Checked"]


class Checked:
    """The models of the last check(), as weak references, so that none is kept alive.

    Findings are not remembered. Each report examines the models anew, so it neither shows an override that is gone nor
    misses a target that another plan has bound. Only what probes said of an override is kept, by the patch, by the
    override's code, and by what else the verdict may depend on.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self.verdicts: dict[Any, Verdict] = {}

    def remember(self, models: list[Any]) -> None:
        # What an override calls may have changed since, and its code has not.
        self.verdicts = {}
        # A class with slots may forbid weak references; a torch module never does.
        self._models = [weakref.ref(model) for model in models if hasattr(type(model), "__weakref__")]

    def living(self) -> list[Any]:
        return [model for model in (reference() for reference in self._models) if model is not None]
