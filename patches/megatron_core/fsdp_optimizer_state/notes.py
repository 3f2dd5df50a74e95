"""What `shim plan` and `shim doctor` say of this patch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

PACKAGE = "megatron_fsdp"


def notes(versions: Mapping[str, Any]) -> Iterator[str]:
    """The distribution megatron-fsdp has the same function under another name."""
    if PathFinder.find_spec(PACKAGE) is not None:
        own = f"megatron.core.distributed.fsdp.src.{PACKAGE}"
        yield (
            "the distribution megatron-fsdp is installed, and its copy of fully_shard_optimizer is not patched. "
            f"Remedy: import {own} in place of {PACKAGE}"
        )
