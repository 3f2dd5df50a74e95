"""The interleaved schedule with shapes of messages, if one stage runs exactly all microbatches before it goes back.

What is wrong (0.12 to 0.20): with `variable_seq_lengths` and without `overlap_p2p_comm`, two stages wait for each other
in every step if one of them has exactly as many forward passes as its warm-up. That stage sends its last output, and
asks for the first gradient afterwards. The next stage exchanges both in one call, which first exchanges the shapes of
both: it waits until its shape is taken, and the other one until its output is. Without shapes a call is one batch, and
all is well. With v virtual stages on p pipeline ranks, and m microbatches in groups of g (p by default), the rank r has
v m forward passes, and 2 (p - 1 - r) + (v - 1) g in its warm-up. So a single group (m = g) hangs if g is even and at
most 2 (p - 1): by default, as many microbatches as pipeline ranks, if that is even.

The patch: such a stage sends its last output and receives the first gradient in one call as well, as upstream's
schedule does on stages with more passes than their warm-up. get_pp_rank_microbatches tells the schedule that not all
microbatches are in the warm-up, and gives the same numbers. The messages are those of stock, in a batch less. Nothing
happens with `overlap_p2p_comm`, without gradients, or without `variable_seq_lengths` (or `mtp_standalone`).

Only gloo was run, where a send ends when it is received. NCCL may end a short one before, and does not promise it.

Upstream: open.

Delete when: no stage asks for a gradient in another call than its neighbour sends it, and the releases before that are
not supported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing

MODULE = "megatron.core.pipeline_parallel.schedules"
COUNTS = f"{MODULE}:get_pp_rank_microbatches"
SCHEDULE = f"{MODULE}:forward_backward_pipelining_with_interleaving"


# Of the model that this thread trains. Up to 0.13, because later counts get a communicator with it.
_CONFIG = Ambient(__name__)


def _sends_shapes_first(config: Any) -> bool:
    """Whether a stage exchanges shapes with both neighbours, and then tensors, each in one batch."""
    if config is None or config.overlap_p2p_comm or config.use_ring_exchange_p2p:
        return False
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return False
    return bool(config.variable_seq_lengths or getattr(config, "mtp_standalone", False))


def _counts(original: Function) -> Function:
    microbatches_of, with_microbatches = argument(original, "num_microbatches"), replacing(original, "num_microbatches")
    forward_only_of = argument(original, "forward_only")
    has_communicator = "p2p_communicator" in inspect.signature(original).parameters
    communicator_of = argument(original, "p2p_communicator") if has_communicator else None

    @functools.wraps(original)
    def get_pp_rank_microbatches(*args: Any, **kwargs: Any) -> Any:
        total, all_in_warmup, warmup, remaining = original(*args, **kwargs)
        config = getattr(communicator_of(args, kwargs), "config", None) if communicator_of else _CONFIG.value
        if all_in_warmup and not forward_only_of(args, kwargs) and _sends_shapes_first(config):
            # The warm-up is cut to the number of passes. With more of them, a longer one would be longer.
            args, kwargs = with_microbatches(args, kwargs, microbatches_of(args, kwargs) + 1)
            all_in_warmup = original(*args, **kwargs)[2] > warmup
        return total, all_in_warmup, warmup, remaining

    return get_pp_rank_microbatches


def _schedule(original: Function) -> Function:
    model_of = argument(original, "model")

    @functools.wraps(original)
    def forward_backward_pipelining_with_interleaving(*args: Any, **kwargs: Any) -> Any:
        model, config = model_of(args, kwargs), _CONFIG.value
        if isinstance(model, list) and model:
            config = vars(sys.modules[MODULE])["get_model_config"](model[0])
        return _CONFIG.call(config, original, *args, **kwargs)

    return forward_backward_pipelining_with_interleaving


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {COUNTS: _counts, SCHEDULE: _schedule},
    "v0_14": {COUNTS: _counts},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
