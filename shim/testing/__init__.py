"""Public test helpers: real megatron-core on CPU, gloo ranks, the truth about packed rows, TE, release cells.

They run in a trainer's own CI, with any release from 0.12 on the path, without a GPU and without Transformer Engine:

    from shim import testing

    def test_packing_equals_alone():
        with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
            model = testing.build_gpt(mtp_num_layers=1)
            row = testing.pack(testing.random_sequences([5, 7, 4]), align=8)
            packed = testing.run_packed(model, row)
            alone = testing.run_alone(model, row)
        assert testing.worst(testing.differences(packed, alone)) < 1e-6

`pretend_cuda` pretends a GPU, and counts host reads, copies and launches by place.
`Ranks(2).run(function)` does the same under tensor, sequence, context or pipeline parallelism.
`python -m shim.testing.cells --all -- tests` runs tests on every release. `transformer_engine_on_cpu()` adds
Transformer Engine's real Python layer: its FP8 contexts, not its kernels. Importing this package imports neither
torch nor megatron.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import CPUCoreAttention
    from .cells import ALL_PAIRS, EVERYDAY, EVERYDAY_PAIRS, run_cells
    from .cpu import megatron_on_cpu
    from .footprint import Footprint
    from .fp8 import Fp8Event, Fp8State, fp8_state, record_fp8_events
    from .generic import generic_proofs, overrides_of
    from .layout import Layout, layout_initialised
    from .model import add_lora, build_chunks, build_gpt, build_hybrid, release
    from .multi_tensor import multi_tensor_ops
    from .oracle import Result, differences, run_alone, run_packed, run_schedule, worst
    from .packing import PackedRow, pack, random_sequences
    from .ranks import RankError, Ranks
    from .releases import COMMITS, RELEASES, TE_RELEASES, FetchError, at_hand, cache_dir, environment, fetch
    from .transformer_engine import CompiledOpError, te_cuda_stand_ins, transformer_engine_on_cpu

__all__ = [
    "ALL_PAIRS",
    "COMMITS",
    "EVERYDAY",
    "EVERYDAY_PAIRS",
    "RELEASES",
    "TE_RELEASES",
    "CPUCoreAttention",
    "CompiledOpError",
    "FetchError",
    "Footprint",
    "Fp8Event",
    "Fp8State",
    "Layout",
    "PackedRow",
    "RankError",
    "Ranks",
    "Result",
    "add_lora",
    "at_hand",
    "build_chunks",
    "build_gpt",
    "build_hybrid",
    "cache_dir",
    "differences",
    "environment",
    "fetch",
    "fp8_state",
    "generic_proofs",
    "layout_initialised",
    "megatron_on_cpu",
    "multi_tensor_ops",
    "overrides_of",
    "pack",
    "random_sequences",
    "record_fp8_events",
    "release",
    "run_alone",
    "run_cells",
    "run_packed",
    "run_schedule",
    "te_cuda_stand_ins",
    "transformer_engine_on_cpu",
    "worst",
]

_MODULES = {
    "attention": ("CPUCoreAttention",),
    "cells": ("ALL_PAIRS", "EVERYDAY", "EVERYDAY_PAIRS", "run_cells"),
    "cpu": ("megatron_on_cpu",),
    "footprint": ("Footprint",),
    "fp8": ("Fp8Event", "Fp8State", "fp8_state", "record_fp8_events"),
    "generic": ("generic_proofs", "overrides_of"),
    "layout": ("Layout", "layout_initialised"),
    "model": ("add_lora", "build_chunks", "build_gpt", "build_hybrid", "release"),
    "multi_tensor": ("multi_tensor_ops",),
    "oracle": ("Result", "differences", "run_alone", "run_packed", "run_schedule", "worst"),
    "packing": ("PackedRow", "pack", "random_sequences"),
    "ranks": ("RankError", "Ranks"),
    "releases": ("COMMITS", "RELEASES", "TE_RELEASES", "FetchError", "at_hand", "cache_dir", "environment", "fetch"),
    "transformer_engine": ("CompiledOpError", "te_cuda_stand_ins", "transformer_engine_on_cpu"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
