"""How long to wait before a process or a thread counts as hanging: the one place that says so."""

from __future__ import annotations

import os

__all__ = ["patience"]


def patience(seconds: float = 600.0) -> float:
    """`seconds` on an idle machine, more where several processes wait for each core. No test takes minutes there."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, waiting)
