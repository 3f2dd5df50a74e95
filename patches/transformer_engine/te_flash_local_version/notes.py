"""What `shim doctor` says of FlashAttention 2 beside the installed Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import InvalidVersion, Version

# From this Transformer Engine on -> the newest FlashAttention 2 that it takes.
NEWEST = {(2, 10): "2.8.3", (2, 6): "2.8.1", (2, 0): "2.7.4.post1"}
LEAST = Version("2.1.1")


def notes(versions: Mapping[str, Any]) -> Iterator[str]:
    """Why FlashAttention 2 is off in this environment, with the remedy. `versions`: of the installed distributions."""
    te = versions.get("transformer-engine")
    if te is None:
        return
    newest = Version(next(newest for since, newest in NEWEST.items() if te.release >= since))
    try:
        found = Version(version("flash-attn"))
    except PackageNotFoundError:
        yield f"FlashAttention 2 is off: flash-attn is not installed. Remedy, if it is needed: flash-attn=={newest}"
        return
    except InvalidVersion:
        return
    if not LEAST <= Version(found.public) <= newest:
        yield (
            f"FlashAttention 2 is off: Transformer Engine {te} takes flash-attn {LEAST} to {newest}, and {found} is "
            f"installed. Remedy: flash-attn=={newest}"
        )
    elif found > newest:
        yield f"FlashAttention 2 is on: {found} is {newest}, which Transformer Engine {te} takes for newer by its label"
