"""The current task of asyncio, for code that keeps the tasks of one thread apart."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["current_task"]


def current_task() -> Any:
    """The task of asyncio that the caller runs in, or None. Does not import asyncio."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio is not None else None
    except RuntimeError:  # no loop is running in this thread
        return None
