"""Proofs of te-cpu-offload."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shim import testing
from shim.testing.proof import CannotRunError, Here, proof

OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
EXTENSIONS = "megatron.core.extensions.transformer_engine"


def offload_manager() -> Any:
    """megatron-core's own, in front of its first chunk; nothing is saved, so nothing is copied to a host."""
    manager = import_module(OFFLOAD).PipelineOffloadManager()
    given = {"pp_rank": 0, "vp_size": 1, "vp_stage": None, "min_offloaded_tensor_size": 1}
    known = inspect.signature(manager.init_model_chunk_offload_handler).parameters
    manager.init_model_chunk_offload_handler(**{name: value for name, value in given.items() if name in known})
    return manager


def flags_cleared_early() -> int:
    manager, flags = offload_manager(), import_module(EXTENSIONS).cpu_offload
    before = flags.CPUOffloadEnabled
    try:
        with manager:
            with manager:
                pass
            cleared = [not flags.CPUOffloadEnabled, not manager.inside_context]
        flags.CPUOffloadEnabled = True  # by the region of somebody else
        with manager:
            pass
        return sum([*cleared, not flags.CPUOffloadEnabled])
    finally:
        flags.CPUOffloadEnabled = before


@proof("{:.0f} of 3 flags cleared early", right="no flag cleared early", te=True)
def an_inner_region_leaves_the_outer_one_open(here: Here) -> float:
    """A region of fine-grained activation offloading ends the region around it.

    To reproduce: enter a PipelineOffloadManager twice, leave the inner region, and look at
    `transformer_engine.pytorch.cpu_offload.CPUOffloadEnabled` and at `manager.inside_context`. Or set the first flag,
    as Transformer Engine's own offloading does, and enter and leave a region inside.

    `__exit__` writes False into both flags, whatever they were. For the rest of the outer region, layers of Transformer
    Engine take nothing for offloaded. Right: a region gives both flags back as it found them. From 0.16 on.
    """
    if find_spec(OFFLOAD) is None:
        raise CannotRunError("fine-grained activation offloading came with megatron-core 0.16")
    return float(here.run(flags_cleared_early)[0])


def one_step() -> None:
    model = testing.build_gpt(mtp_num_layers=None)
    testing.run_packed(model, testing.pack(testing.random_sequences([5, 7, 4])))


@proof(
    "{:.0f} models not built",
    right="a model is built",
    defect="crash",
    crashes="^TypeError: .*retain_pinned_cpu_buffers",
    te=True,
    variants=("v0_17",),
)
def a_model_can_be_built(here: Here) -> float:
    """megatron-core 0.17 builds no model with Transformer Engine 2.5 to 2.9.

    To reproduce: build any GPTModel.

    TransformerBlock asks for the context of CPU offloading even if offloading is off, and passes Transformer Engine
    retain_pinned_cpu_buffers, which came with 2.10: TypeError. Right is what 0.18 does: leave the argument out if
    Transformer Engine does not know it.
    """
    known = inspect.signature(import_module(EXTENSIONS)._get_cpu_offload_context).parameters
    if "double_buffering" not in known or "retain_pinned_cpu_buffers" in known:
        raise CannotRunError("only with Transformer Engine 2.5 to 2.9, which lacks retain_pinned_cpu_buffers")
    here.run(one_step)
    return 0.0
