"""Whether the interpreter is ending: modules go one by one, nothing can be imported, and nothing need be restored."""

from __future__ import annotations

import sys

__all__ = ["is_ending"]


def is_ending() -> bool:
    """Whether Python has begun to take its modules apart. Functions of atexit run before that."""
    # Python sets both to None before it collects what is left. `sys` is this module's own name for it.
    return sys is None or sys.meta_path is None
