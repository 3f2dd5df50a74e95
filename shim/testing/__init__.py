"""Public test helpers: real megatron-core on CPU, gloo ranks, the truth about packed rows, release cells.

In a trainer's own CI, with any release from 0.12 on the path, no GPU and no Transformer Engine:

    from shim import testing

    def test_packing_equals_alone():
        with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
            model = testing.build_gpt(mtp_num_layers=1)
            row = testing.pack(testing.random_sequences([5, 7, 4]), align=8)
            packed = testing.run_packed(model, row)
            alone = testing.run_alone(model, row)
        assert testing.worst(testing.differences(packed, alone)) < 1e-6

`Ranks(2).run(function)` does the same under tensor, sequence, context or pipeline parallelism, and
`python -m shim.testing.cells --all -- tests` on every release. Importing this package imports neither torch
nor megatron.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import CPUCoreAttention
    from .cells import EVERYDAY, run_cells
    from .cpu import megatron_on_cpu
    from .layout import Layout, layout_initialised
    from .model import add_lora, build_chunks, build_gpt, build_hybrid, release
    from .oracle import Result, differences, run_alone, run_packed, run_schedule, worst
    from .packing import PackedRow, pack, random_sequences
    from .ranks import RankError, Ranks
    from .releases import RELEASES, FetchError, cache_dir, environment, fetch

__all__ = [
    "EVERYDAY",
    "RELEASES",
    "CPUCoreAttention",
    "FetchError",
    "Layout",
    "PackedRow",
    "RankError",
    "Ranks",
    "Result",
    "add_lora",
    "build_chunks",
    "build_gpt",
    "build_hybrid",
    "cache_dir",
    "differences",
    "environment",
    "fetch",
    "layout_initialised",
    "megatron_on_cpu",
    "pack",
    "random_sequences",
    "release",
    "run_alone",
    "run_cells",
    "run_packed",
    "run_schedule",
    "worst",
]

_MODULES = {
    "attention": ("CPUCoreAttention",),
    "cells": ("EVERYDAY", "run_cells"),
    "cpu": ("megatron_on_cpu",),
    "layout": ("Layout", "layout_initialised"),
    "model": ("add_lora", "build_chunks", "build_gpt", "build_hybrid", "release"),
    "oracle": ("Result", "differences", "run_alone", "run_packed", "run_schedule", "worst"),
    "packing": ("PackedRow", "pack", "random_sequences"),
    "ranks": ("RankError", "Ranks"),
    "releases": ("RELEASES", "FetchError", "cache_dir", "environment", "fetch"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
