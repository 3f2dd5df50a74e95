"""The memory of a pipeline stage's output while it is being sent.

What is wrong (0.12 to 0.17): with `overlap_p2p_comm` the interleaved schedule starts to send an output, and frees it by
`deallocate_pipeline_outputs` before the message has been waited for. If the memory is in other use by then, its
new content is silently sent to the next stage. With `overlap_p2p_comm_warmup_flush` this holds for the outputs of
the warm-up as well. The work of the message keeps the tensor, but that does not help: freeing it exchanges the memory
of this very tensor.

What the patch does: an alias of the output is sent. So the work of the message keeps the memory, and gives it back when
the schedule has waited for it, or has dropped it. The schedule waits for an output's message when it has begun to send
the next one, so that one output lives longer than on stock. Nothing is copied, no message more is sent, and no rank
waits. Upstream's own way waits for the message before it frees. Gradients are never freed by hand, and are sent as they
are.

Upstream: fixed in 0.18 by pull request 4047.

Delete when: releases before 0.18 are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

P2P_OPS = "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops"


def _p2p_ops(original: Function) -> Function:
    output_of, with_output = argument(original, "tensor_send_next"), replacing(original, "tensor_send_next")

    @functools.wraps(original)
    def _p2p_ops(*args: Any, **kwargs: Any) -> Any:
        output = output_of(args, kwargs)
        if output is not None:
            args, kwargs = with_output(args, kwargs, output.detach())
        return original(*args, **kwargs)

    return _p2p_ops


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {P2P_OPS: _p2p_ops}
