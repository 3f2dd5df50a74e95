"""Tied embeddings that are frozen, under pipeline parallelism.

What is wrong (0.12): the first and the last pipeline stage each have a copy of a tied embedding, and with multi-token
prediction of any embedding. finalize_model_grads sums their gradients. A frozen embedding has no gradient, and the
all-reduce of None raises a TypeError in the first step. So LoRA on a model with tied embeddings cannot be trained on
more than one pipeline stage.

The patch leaves out the sum if the embedding of this stage has no gradient, as later releases do. If there is one,
stock does it all.

Upstream: fixed by commit afb755f548, in 0.13.

Not covered, on no release: an embedding that is frozen on one stage and trained on the other. The stage that trains it
waits for the other one for ever. `embedding.word_embeddings.weight` on the first stage and `output_layer.weight` on the
last one are the same weight, so freeze both.

Delete when: megatron-core 0.12 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shim.patches._arguments import Function, argument

FINALIZE = "megatron.core.distributed.finalize_model_grads"
ALLREDUCE = f"{FINALIZE}:_allreduce_word_embedding_grads"


def _allreduce_word_embedding_grads(original: Function) -> Function:
    model_of = argument(original, "model")

    @functools.wraps(original)
    def _allreduce_word_embedding_grads(*args: Any, **kwargs: Any) -> Any:
        if _without_gradient(model_of(args, kwargs)):
            return None
        return original(*args, **kwargs)

    return _allreduce_word_embedding_grads


def _without_gradient(model: Sequence[Any]) -> bool:
    """Whether chunks of this rank have a copy of the embedding, and none of them a gradient."""
    main_grad_of = sys.modules[FINALIZE]._get_main_grad_attr
    gradients = []
    for chunk in model:
        settings, inner = getattr(chunk, "ddp_config", None), chunk
        while inner is not None and not hasattr(inner, "shared_embedding_or_output_weight"):
            inner = getattr(inner, "module", None)
        weight = None if inner is None else inner.shared_embedding_or_output_weight()
        if weight is not None:
            gradients.append(getattr(weight, main_grad_of(weight, getattr(settings, "use_custom_fsdp", False))))
    return bool(gradients) and all(gradient is None for gradient in gradients)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {ALLREDUCE: _allreduce_word_embedding_grads}
