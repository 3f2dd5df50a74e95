"""The norm of multi-latent attention's compressed query under tensor parallelism.

What is wrong (from 0.12 on): finalize_model_grads sums the gradient of each weight with "q_layernorm" in its name over
tensor-parallel ranks. That is right for the norm of a rank's own heads. In multi-latent attention the norm of that name
is one of the compressed query, which all ranks have, and its gradient is whole on each rank. Without sequence
parallelism the sum is as many times too large as there are ranks, and so is its part in the norm that clips gradients.
The norm of the compressed key is not summed. Under sequence parallelism each rank has some of the tokens, and the sum
is right.

What the patch does: it passes each chunk of the model on without the weights of those norms, unless they carry the mark
sequence_parallel. All other gradients are summed or averaged as before, in the same messages.

Upstream: open.

A trainer may have another function in the place of the one that sums, as slime has, which sums in chunks and has the
same defect. The patch holds around it, as long as it asks chunks for their named parameters.

Delete when: finalize_model_grads leaves these norms out in every supported release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._chunk_parameters import Chosen, Named, owners

FINALIZE = "megatron.core.distributed.finalize_model_grads"
SUMS = {"v0_12": "_allreduce_layernorm_grads", "v0_13": "_allreduce_non_tensor_model_parallel_grads"}
NORM = "q_layernorm"
COMPRESSED = "kv_layernorm"  # an attention that norms a compressed key has a compressed query as well, or no such norm


def _sum(original: Function) -> Function:
    model_of, with_model = argument(original, "model"), replacing(original, "model")

    @functools.wraps(original)
    def sum_gradients(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_model(args, kwargs, [_without_whole(chunk) for chunk in model_of(args, kwargs)])
        return original(*args, **kwargs)

    return sum_gradients


def _without_whole(chunk: Any) -> Chosen:
    """What stands for the chunk without weights whose gradients are whole on each rank."""

    def choose(named: Named) -> Named:
        return [(name, weight) for name, weight in named if NORM not in name or not _is_whole(chunk, name, weight)]

    return Chosen(chunk, choose)


def _is_whole(chunk: Any, name: str, weight: Any) -> bool:
    if getattr(weight, "sequence_parallel", False):
        return False
    return any(hasattr(module, COMPRESSED) for module in owners(chunk, name, weight, NORM))


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {f"{FINALIZE}:{SUMS[variant]}": _sum}
