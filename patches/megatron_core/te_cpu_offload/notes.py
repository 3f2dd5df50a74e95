"""What `shim doctor` says of this patch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from shim.patches.megatron_core.te_cpu_offload.variable import ID, NAME, PACKAGE, SETTING, VALUE, WITHOUT


def notes(versions: Mapping[str, Any]) -> Iterator[str]:
    """What is missing in this environment, with the remedy. `versions`: of the installed distributions."""
    te = versions.get("transformer-engine")
    if te is not None and te.release >= (2, 10) and os.environ.get(NAME) != VALUE:
        asked = f"shim.apply(options={ {ID: {'set_variable': True}} })"
        remedy = f"set it for the process, or call {asked} before {PACKAGE} is imported"
        yield f"{SETTING} is not set, so {WITHOUT}. Remedy: {remedy}"
