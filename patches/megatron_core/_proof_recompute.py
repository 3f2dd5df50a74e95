"""Settings of recompute, for proofs."""

from __future__ import annotations

from typing import Any

NORMS: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
