"""The log of a mixture of experts, if a pipeline stage has no experts and the model has MTP.

What is wrong (0.13 to 0.16): routers keep their auxiliary losses in a tensor with one place for each layer, MTP layers
included. track_moe_metrics sums these tensors over the pipeline. A stage without experts has none, and
`force_initialize` makes one there, without the places of the MTP layers. The stages then sum tensors of different
length: NCCL waits for ever or sums what does not belong together, and gloo raises. The first stages of a model whose
first layers are dense, as those of DeepSeek-V3, are such stages.

The patch lets such a stage make the tensor as a router would, by upstream's own function, before track_moe_metrics
runs. That stage then holds a tensor with more places, one for each MTP layer. Without MTP nothing changes.

Upstream: Megatron-LM pull request 3401, in 0.17.

A trainer that does not pass `mtp_num_layers` to track_moe_metrics hangs in every release, with and without the patch.

Delete when: no supported release is older than 0.17.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument

MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
TRACK_MOE_METRICS = f"{MOE_UTILS}:track_moe_metrics"
ARGUMENTS = "force_initialize", "track_names", "num_layers", "mtp_num_layers"


def _track_moe_metrics(original: Function) -> Function:
    getters = [argument(original, name) for name in ARGUMENTS]

    @functools.wraps(original)
    def track_moe_metrics(*args: Any, **kwargs: Any) -> Any:
        forced, names, layers, mtp_layers = (get(args, kwargs) for get in getters)
        if forced and names and layers is not None and mtp_layers:
            moe_utils = sys.modules[MOE_UTILS]
            tracker = moe_utils.get_moe_layer_wise_logging_tracker()
            for name in names:
                if name not in tracker:
                    nothing = torch.zeros((), device="cuda")
                    moe_utils.save_to_aux_losses_tracker(name, nothing, 1, layers + mtp_layers)
        return original(*args, **kwargs)

    return track_moe_metrics


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TRACK_MOE_METRICS: _track_moe_metrics}
