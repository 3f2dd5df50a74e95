"""The task of asyncio that asks, for whoever tells tasks of one thread apart."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["current_task"]


def current_task() -> Any:
    """The task of asyncio that this runs in, or None; asyncio is not imported for the question."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio is not None else None
    except RuntimeError:  # no loop is running in this thread
        return None
