"""The generic proofs on a user's own model."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shim._errors import OptionError

if TYPE_CHECKING:
    from shim.testing.proof import Proof

__all__ = ["build_of", "overrides_on", "proofs_on"]


def build_of(model: str) -> Callable[..., Any]:
    """The function that "my_module:build" names. The module may be in the working directory."""
    module, _, name = model.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise OptionError(f"--model {model}: {error}") from error
    build = getattr(found, name, None)
    if not callable(build):
        raise OptionError(f"--model {model}: {module} has no function {name}")
    return build


def proofs_on(model: str) -> list[Proof]:
    """The generic proofs on the model that this function builds."""
    from shim.testing.generic import generic_proofs

    return generic_proofs(build_of(model))


def overrides_on(model: str, device: str) -> list[dict[str, str]]:
    """The verdict of shim, applied in this process, on the trainer's overrides in that model; see `overrides_of`."""
    from shim.testing.proof import Here
    from shim.testing.user_model import Build

    [found] = Here(device).run(_overrides_of_built, Build.of(build_of(model)), device)
    return found


def _overrides_of_built(build: Any, device: str) -> list[dict[str, str]]:
    from shim.testing.generic import overrides_of
    from shim.testing.user_model import built

    return overrides_of(built(build, device))
