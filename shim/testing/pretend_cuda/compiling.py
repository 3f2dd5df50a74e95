"""torch.compile while a device is pretended: functions run as they are, for nothing inside compiled code is seen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from shim._torch_names import TRACE_RULES

__all__ = ["run_as_they_are"]


@contextlib.contextmanager
def run_as_they_are() -> Iterator[None]:
    """To be entered before torch.cuda is substituted: dynamo must not keep the substitutes as functions of torch."""
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        rules: Any = sys.modules.get(TRACE_RULES)
        if rules is not None:
            rules.clear_lru_cache()
