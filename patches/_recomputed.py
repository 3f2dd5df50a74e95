"""What a checkpoint is given to run again, in the place of a function."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


class Recomputed:
    """It calls `run`, and shows the cells of `function`.

    Trainers look for a layer directly among the cells of what a checkpoint runs again.
    """

    def __init__(self, function: Callable[..., Any], run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.run = function, run

    @property
    def __closure__(self) -> tuple[types.CellType, ...]:
        return getattr(self.function, "__closure__", None) or ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)
