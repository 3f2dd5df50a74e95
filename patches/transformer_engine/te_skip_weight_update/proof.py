"""Proof of te-skip-weight-update."""

from __future__ import annotations

from shim.testing.fp8 import state_manager
from shim.testing.proof import Here, proof


@proof(
    "the flag off by {:.0f}",
    right="the flag is set",
    defect="crash",
    crashes="^AttributeError: .*set_skip_fp8_weight_update_tensor",
    te=True,
    devices=("cpu", "cuda"),
)
def cuda_graphs_set_the_flag_of_weight_updates(here: Here) -> float:
    """FP8GlobalStateManager.set_skip_fp8_weight_update_tensor is gone: CUDA graphs of megatron-core fail under FP8.

    To reproduce, with megatron-core 0.12 to 0.17: train in FP8 with enable_cuda_graph=True and more than one
    microbatch. The capture of the first layer, and every replay, call
    `FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not is_first_microbatch)`, which raises AttributeError.

    2.15 moved the flag to `FP8GlobalStateManager.quantization_state`, where layers still read it, and left out the
    method that sets it. Right is what 2.14 does and 2.17 does again: it writes the flag in place, because captured
    graphs hold the tensor. Wrong in 2.15 and 2.16.
    """
    manager = state_manager()
    state = getattr(manager, "quantization_state", manager)  # its place from 2.15
    before = state.skip_fp8_weight_update_tensor
    try:
        manager.set_skip_fp8_weight_update_tensor(True)
        flag = state.skip_fp8_weight_update_tensor
        off = abs(float(flag) - 1)
        manager.set_skip_fp8_weight_update_tensor(False)
        return off + abs(float(flag)) + float(state.skip_fp8_weight_update_tensor is not flag)
    finally:
        state.skip_fp8_weight_update_tensor = before
