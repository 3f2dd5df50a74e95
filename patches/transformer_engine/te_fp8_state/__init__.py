"""The FP8 state of Transformer Engine in a recompute, and after a region that cannot be entered.

What is wrong (2.1 to 2.20):
1. 2.1: `checkpoint` recomputes outside the FP8 region of its call. The recompute runs in BF16, or fails with delayed
   scaling. 2.2 restores the region.
2. 2.1 to 2.3, delayed scaling: a layer recomputes with the scales of its forward pass. Meanwhile the updated scales are
   kept by reference and so overwritten: after the recompute the update is lost. 2.4 keeps copies.
3. 2.2 to 2.20, delayed scaling: leaving the restored region reduces amax over ranks and moves every amax history on,
   once for each recomputed chunk, although the forward pass has already done so. Histories forget earlier than
   amax_history_len says, scales differ from those without recompute, and each chunk costs a collective.
4. 2.1 to 2.20, delayed scaling: queues of the process, first in, first out, keep what a recompute takes again (scales,
   amax histories, whether the first module of the region is still to come). A recompute takes the scales of another
   forward pass if backward runs in another order (one layer for several depths of MTP, two microbatches) or if a
   forward pass never ran backward. A second backward (retain_graph) finds no scales, nor does a module in evaluation
   mode (up to 2.19).
5. A nested checkpoint ends the tracking of the outer one, and its own recompute takes the current scales.
6. A recompute that raises leaves its modules with the scales of the forward pass.
7. Entering a region that the GPU does not support raises after the state was set, and leaves FP8 switched on for all
   that follows. 2.7 checks first, but not for NVFP4 and not without a recipe.

The patch: a recompute runs in the region of its forward pass, takes the scales of that forward pass, and leaves scales
and histories as they were. A region that cannot be entered leaves no trace. Every checkpoint keeps the scales of its
own forward pass, so the scales are freed with the checkpoint.

The calls. On the right is the file that wraps the function, with the defect. `_fp8_scales` of shim.patches has the
ForwardScales of one checkpoint, and which checkpoints this thread is in; it also restores the scales of modules after a
recompute that raises (6):

    a checkpoint runs   _CheckpointFunction.forward              checkpoints: records into its scales (4), region (1)
                        or get_activation_recompute_contexts     checkpoints: the same, if it is non-reentrant (4)
                          activation_recompute_forward           tracked_regions: nests (5)
      a module runs         copy_forward_fp8_meta_tensors...     scales: to the checkpoints that record (4)
        in evaluation       init_fp8_metadata                    scales: makes that call, too (4)
    backward            _CheckpointFunction.backward             checkpoints: replays its scales, and frees them (4)
                          activation_recompute_forward           tracked_regions: nests (5)
                            (fp8_)autocast_enter, _exit          autocast_regions: reduces nothing (3)
      a module runs           get_old_fp8_meta_tensors...        scales: from this checkpoint (4), copies (2)
    anybody             (fp8_)autocast_enter                     autocast_regions: fails without a trace (7)

megatron-core uses the reentrant `checkpoint`, so in 2.1 use_reentrant=False does not change. The region that
`checkpoint` restores from 2.2 on has no amax group; a recompute uses none.

Not covered: operations of transformer_engine.pytorch.ops, which Transformer Engine's own bookkeeping also leaves out;
LayerNormMLP(checkpoint=True), which recomputes itself and keeps its queue; the scales of gradients, which every
recomputed module moves on (upstream). FP8 attention in a module in evaluation mode (2.8 to 2.19) keeps no scales: its
recompute raises ScalesError.

Upstream: open. A variant can go when its releases are no longer supported.

Delete when: a checkpoint keeps its own scales and reduces nothing in a recompute upstream, and a failed entry restores
the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches.transformer_engine.te_fp8_state.autocast_regions import patch_autocast_enter, patch_autocast_exit
from shim.patches.transformer_engine.te_fp8_state.checkpoints import (
    patch_checkpoint_backward,
    patch_checkpoint_forward,
    patch_checkpoint_forward_in_its_region,
    patch_recompute_contexts,
)
from shim.patches.transformer_engine.te_fp8_state.scales import (
    patch_copy_forward,
    patch_get_old,
    patch_get_old_with_copies,
    patch_init_fp8_metadata,
)
from shim.patches.transformer_engine.te_fp8_state.tracked_regions import patch_region_enter, patch_region_exit

DISTRIBUTED = "transformer_engine.pytorch.distributed:"
CHECKPOINT = DISTRIBUTED + "_CheckpointFunction."
MODULE = "transformer_engine.pytorch.module.base:TransformerEngineBaseModule."
FP8 = "transformer_engine.pytorch.fp8:FP8GlobalStateManager."
QUANTIZATION = "transformer_engine.pytorch.quantization:FP8GlobalStateManager."  # its place from 2.9
COPY, GET = "copy_forward_fp8_meta_tensors_for_recompute", "get_old_fp8_meta_tensors_for_recompute"

Bindings = dict[str, Callable[[Function], Function]]

TRACKED: Bindings = {
    CHECKPOINT + "forward": patch_checkpoint_forward,
    CHECKPOINT + "backward": patch_checkpoint_backward,
    DISTRIBUTED + "get_activation_recompute_contexts": patch_recompute_contexts,
    DISTRIBUTED + "activation_recompute_forward.__enter__": patch_region_enter,
    DISTRIBUTED + "activation_recompute_forward.__exit__": patch_region_exit,
}
EVALUATION: Bindings = {MODULE + "init_fp8_metadata": patch_init_fp8_metadata}
UNTIL_2_8: Bindings = {
    **TRACKED,
    **EVALUATION,
    FP8 + COPY: patch_copy_forward,
    FP8 + GET: patch_get_old,
    FP8 + "fp8_autocast_enter": patch_autocast_enter,
    FP8 + "fp8_autocast_exit": patch_autocast_exit,
}
FROM_2_9: Bindings = {
    **TRACKED,
    QUANTIZATION + COPY: patch_copy_forward,
    QUANTIZATION + GET: patch_get_old,
    QUANTIZATION + "autocast_enter": patch_autocast_enter,
    QUANTIZATION + "autocast_exit": patch_autocast_exit,
}
BINDINGS: dict[str, Bindings] = {
    "v2_0": {
        **UNTIL_2_8,
        CHECKPOINT + "forward": patch_checkpoint_forward_in_its_region,
        FP8 + GET: patch_get_old_with_copies,
    },
    "v2_2": {**UNTIL_2_8, FP8 + GET: patch_get_old_with_copies},
    "v2_4": UNTIL_2_8,
    "v2_9": {**FROM_2_9, **EVALUATION},
    "v2_20": FROM_2_9,  # modules in evaluation mode find their scales
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
