"""Shared experts beside the all-gather dispatcher, which is the default, over tensor- or expert-parallel ranks.

What is wrong (0.13 and 0.14): the dispatcher gathers the tokens of all ranks into the global memory buffer. Shared
experts run behind that and in front of the permutation, and under sequence parallelism they gather their own tokens
into the same buffer. Autograd notices that the tokens were overwritten and raises. Without gradients nothing raises:
under expert parallelism the experts compute on wrong tokens, in an evaluation or for the log-probabilities of a policy.

The patch lets the dispatcher of a layer with shared experts gather into memory of its own, which is free again behind
the permutation. Other layers keep the buffer. The function that gathers is wrapped in the dispatcher's module alone:
mla-rope-key-gradient wraps the one of multi-latent attention.

Upstream: 0.15 runs shared experts in front of the dispatcher, and 0.12 behind the experts.

Delete when: megatron-core 0.14 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, replacing

DISPATCH = "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.token_dispatch"
GATHER = "megatron.core.transformer.moe.token_dispatcher:gather_from_sequence_parallel_region"


_SHARED = Ambient(__name__)  # whether a dispatcher beside shared experts gathers


def _token_dispatch(original: Function) -> Function:
    @functools.wraps(original)
    def token_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = self.config.moe_shared_expert_intermediate_size is not None
        return _SHARED.call(shared, original, self, *args, **kwargs)

    return token_dispatch


def _gather(original: Function) -> Function:
    with_buffer = replacing(original, "use_global_buffer")

    @functools.wraps(original)
    def gather_from_sequence_parallel_region(*args: Any, **kwargs: Any) -> Any:
        if _SHARED.value:
            args, kwargs = with_buffer(args, kwargs, False)
        return original(*args, **kwargs)

    return gather_from_sequence_parallel_region


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {DISPATCH: _token_dispatch, GATHER: _gather}
