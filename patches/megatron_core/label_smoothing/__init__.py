"""Label smoothing under tensor parallelism.

What is wrong (0.12 to 0.20): vocab_parallel_cross_entropy with label_smoothing takes the rank's part of the vocabulary
for the whole vocabulary, both in the number of entries and in the mean of their log-probabilities. With TP above one,
losses and gradients are wrong, and the losses differ between ranks.

The patch: with label smoothing and TP above one, shim.ops.token_logprobs computes the loss. It smooths over the global
vocabulary with one all-gather. A negative target then means no target: loss and gradient are zero. Every other call
goes to upstream's function.

If chunked-logprob is also applied, it is the outer layer and computes the same loss.

Upstream: open.

Delete when: vocab_parallel_cross_entropy smooths over the whole vocabulary, and the releases before that are not
supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function, argument
from shim.patches.megatron_core._token_losses import token_losses

TARGET = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"


def _vocab_parallel_cross_entropy(original: Function) -> Function:
    logits_of, target_of = argument(original, "vocab_parallel_logits"), argument(original, "target")
    smoothing_of, group_of = argument(original, "label_smoothing"), _group(original)

    @functools.wraps(original)
    def vocab_parallel_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        smoothing = smoothing_of(args, kwargs)
        group = group_of(args, kwargs) if smoothing > 0 else None
        if group is None or group.size() == 1:
            result: Tensor = original(*args, **kwargs)
            return result
        return token_losses(logits_of(args, kwargs), target_of(args, kwargs), group, smoothing)

    return vocab_parallel_cross_entropy


def _group(original: Function) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """A getter for the tensor-parallel group of a call. Later releases take the group as an argument."""
    given_of = (
        argument(original, "tp_group")
        if "tp_group" in inspect.signature(original).parameters
        else lambda args, kwargs: None
    )

    def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        from megatron.core import parallel_state

        given = given_of(args, kwargs)
        return parallel_state.get_tensor_model_parallel_group() if given is None else given

    return get


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _vocab_parallel_cross_entropy}
