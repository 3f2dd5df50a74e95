"""Overlapped sums of gradients beside multi-token prediction with tied embeddings.

What is wrong: the stage of multi-token prediction (MTP) has a copy of the embeddings, with which it computes logits if
embeddings are tied. The weight of its output layer is there as well, and no step uses it (0.12 to 0.20, on any stage
but the first). DistributedDataParallel with overlap_grad_reduce expects a gradient of each weight in a step. The bucket
of this one is never complete, so the run stops with an AssertionError: up to 0.15 at the end of the first backward
pass, with "Communication call has not been issued for this bucket"; from 0.16 on, which sums the first step's
gradients in any case, at the start of the second step, without a message.

What the patch does: the unused weight counts as ready as soon as the embeddings' copy on its stage is. Its gradient
stays zero, as without overlap_grad_reduce, and buckets, messages and checkpoints are those of such a run.

Upstream: the weight is still made on main.

Delete when: megatron-core makes no weight for an output layer that uses that of the embeddings, on stages with MTP too,
and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.nn import Parameter

from shim.patches._arguments import Function

HOOK = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook"


def _make_hook(original: Function) -> Function:
    @functools.wraps(original)
    def _make_backward_post_hook(self: Any, param: Parameter) -> Function:
        hook = original(self, param)
        # A mark that upstream sets on tied embeddings, so that few weights are looked up among the modules.
        if not (self.ddp_config.overlap_grad_reduce and getattr(param, "shared_embedding", False)):
            return hook
        unused = [weight for copy, weight in unused_weights(self.module) if copy is param and weight.requires_grad]
        if not unused:
            return hook

        @functools.wraps(hook)
        def hook_of_both(*args: Any) -> None:
            hook(*args)
            if sys.modules[type(self).__module__].is_graph_capturing():  # upstream's hook does nothing either
                return
            forced = (self.force_all_reduce,) if hasattr(self, "force_all_reduce") else ()  # from 0.16 on
            for weight in unused:
                self.param_to_bucket_group[weight].register_grad_ready(weight, *forced)

        return hook_of_both

    return _make_backward_post_hook


def unused_weights(model: Any) -> Iterator[tuple[Parameter, Parameter]]:
    """The copy of the embeddings and the output layer's weight that it stands in for, of each model with MTP within."""
    for module in model.modules():
        if getattr(module, "mtp_process", False) and not module.pre_process:
            weight = getattr(getattr(module, "output_layer", None), "weight", None)
            if module.share_embeddings_and_output_weights and weight is not None:
                yield module.embedding.word_embeddings.weight, weight


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {HOOK: _make_hook}
