"""Transformer Engine's fused cross entropy without its copy of the logits.

What is large, if parallel_cross_entropy is called, or cross_entropy_fusion_impl="te" of megatron-core is set (2.18 to
2.20.2). With 8192 tokens and a vocabulary of 151,936, logits in bf16 have 2.5 GB:
- 2.18: forward makes the gradient in fp32, 4 bytes a logit (5.0 GB), and keeps it until backward. There autograd makes
  a second one in the dtype of the logits.
- 2.19 and later: forward keeps a copy of the logits in their dtype (2.5 GB), over which backward writes the gradient,
  unless the caller passes overwrite_input=True. megatron-core never does.
- 2.18: with label_smoothing under tensor parallelism each rank sums its own columns only, so that the losses of ranks
  differ. The gradients are right.

The patch: the function returns what shim.ops computes, which saves the logits themselves. Gradients and losses are as
exact as stock's, in fp32 and rounded once. Ranks exchange numbers once, as on stock. Backward writes the gradient over
the logits if nobody can read them any more: no variable, no container, no other tensor with their memory, no other
node of autograd's graph, and the graph is not retained. Otherwise, and for leaves and views, it makes a separate
gradient, in the bytes that stock's copy has. So what reads the logits after the call reads them as on stock.

- A call with overwrite_input=True stays upstream's: it makes no copy.
- is_cg_capturable means nothing, because no pass waits for the GPU.
- A negative target means no target, as ignore_idx does. A target beyond the vocabulary is an error; stock returned an
  infinite loss.
- A backward pass may run twice if the graph was retained. Stock raised from 2.19 on, and in 2.18 the second gradient
  was multiplied with the losses' gradient twice.

te-cross-entropy does the same and more for releases before 2.18, which write over the logits in forward and copy none.

Upstream: open. 2.19 added overwrite_input, and left it off.

Delete when: megatron-core passes overwrite_input or the function makes no copy, and the releases before are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function
from shim.patches.transformer_engine._cross_entropy import PARALLEL_CROSS_ENTROPY, by_name


def _parallel_cross_entropy(original: Function) -> Function:
    without_copy = by_name(original, mean_shape=(1,), inplace="unread")

    @functools.wraps(original)
    def parallel_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        function = original if kwargs.get("overwrite_input") else without_copy
        found: Tensor = function(*args, **kwargs)
        return found

    return parallel_cross_entropy


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {PARALLEL_CROSS_ENTROPY: _parallel_cross_entropy}
