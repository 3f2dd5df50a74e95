"""Configs that are changed around a call, for proofs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import shim


@contextlib.contextmanager
def toggled(config: Any, **fields: Any) -> Iterator[None]:
    """What a trainer writes by hand."""
    before = {name: getattr(config, name) for name in fields}
    vars(config).update(fields)
    try:
        yield
    finally:
        vars(config).update(before)


@contextlib.contextmanager
def overridden(config: Any, **fields: Any) -> Iterator[None]:
    """shim.config_override; where it is refused, because checkpoints would not keep it, there is only the toggle."""
    with contextlib.ExitStack() as entered:
        try:
            entered.enter_context(shim.config_override(config, **fields))
        except shim.NotMetError:
            entered.enter_context(toggled(config, **fields))
        yield
