"""The gradient of DSA's indexer under sequence parallelism.

What is wrong (0.16 to 0.18), silent: the indexer of DeepSeek sparse attention (experimental_attention_variant="dsa")
gathers the tokens of all tensor-parallel ranks, and each rank has all of it, so each has the whole gradient. But its
duplicated linear layers and its norm get the mark sequence_parallel, which says that a rank has the gradient of its own
tokens. finalize_model_grads adds those of all ranks: the gradient is TP times too large. The norm of all gradients has
it, too, so that more is clipped.

What the patch does: it takes the mark from the parameters of an indexer when it is built. Each rank has the gradient of
one rank then, as without sequence parallelism, where stock does not add it either. A few bytes are sent less. Models
that were built before keep the mark.

Upstream: Megatron-LM pull request 5099, in 0.19, marks the parameters average_gradients_across_tp_domain: the same
numbers, and a message.

Delete when: 0.19 is the oldest supported release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

INIT = "megatron.core.transformer.experimental_attention_variant.dsa:DSAIndexer.__init__"


def _init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for weight in self.parameters():
            if getattr(weight, "sequence_parallel", False):
                weight.sequence_parallel = False

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: _init}
