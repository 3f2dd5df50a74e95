"""The part of shim that only a source tree has: maintenance/, beside the package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shim._errors import OptionError
from shim._matrix import load

__all__ = ["in_checkout", "maintenance"]


def in_checkout() -> bool:
    """Whether this shim runs from a source tree."""
    return (load.PACKAGE.parent / "maintenance" / "commands.py").is_file()


def maintenance(command: str, instead: str = "") -> Any:
    """The module `shim.maintenance.commands`. OptionError in an installed shim, which has none.

    command: what was called.    instead: what an installed shim can do, as a sentence.
    """
    if not in_checkout():
        raise OptionError(
            f"{command} is for developers of shim and needs a source checkout; {load.PACKAGE} is an installed shim. "
            f"Remedy: clone shim's repository, run `make env` in it, and call .venv/bin/{command} there.{instead}"
        )
    return import_module("shim.maintenance.commands")  # by name, because a wheel has no such module
