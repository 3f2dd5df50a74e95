"""Views that nobody may write to, from tensor-parallel mappings over one rank.

What is wrong (0.12 to 0.20): over one rank the mappings that reduce or gather have nothing to do. They give back their
input, but through an autograd function. So the result is a view, and autograd raises if somebody writes to it in place:
- The cross entropy takes the largest logit off in place. With logits in fp32 that the output layer gathers
  (`parallel_output=False` or `runtime_gather_output=True`), the first backward pass raises.
- From 0.15 on MLP adds the bias of a local expert in place. Experts with biases on one expert-parallel and one
  expert-tensor-parallel rank raise in their first forward pass, with sequence parallelism and without.

The patch lets gather_from_tensor_model_parallel_region return the input itself if the group has one rank. From 0.15 on
reduce_from_tensor_model_parallel_region and reduce_scatter_to_sequence_parallel_region do the same. It saves a node of
the graph. Nothing happens to a call over several ranks. The other mappings are left alone, because nothing in
megatron-core writes to what they return.

Upstream: Megatron-LM pull request 6657 (issue 6656) does the same for the gather, in no release yet. The others are
open.

Delete when: the supported releases return the input over one rank in all three.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

MAPPINGS = "megatron.core.tensor_parallel.mappings"
GATHER = f"{MAPPINGS}:gather_from_tensor_model_parallel_region"
REDUCE = f"{MAPPINGS}:reduce_from_tensor_model_parallel_region"
REDUCE_SCATTER = f"{MAPPINGS}:reduce_scatter_to_sequence_parallel_region"


def _of_default_group(original: Function) -> Function:
    input_of = argument(original, "input_")

    @functools.wraps(original)
    def over_ranks(*args: Any, **kwargs: Any) -> Any:
        alone = sys.modules[MAPPINGS].get_tensor_model_parallel_world_size() == 1
        return input_of(args, kwargs) if alone else original(*args, **kwargs)

    return over_ranks


def _of_group(original: Function) -> Function:
    input_of = argument(original, "input_")
    group_of, with_group = argument(original, "group"), replacing(original, "group")

    @functools.wraps(original)
    def over_ranks(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args, kwargs)
        if group is None:
            group = sys.modules[MAPPINGS].get_tensor_model_parallel_group_if_none(group)
            args, kwargs = with_group(args, kwargs, group)  # or upstream would warn of the default once more
        return input_of(args, kwargs) if group is not None and group.size() == 1 else original(*args, **kwargs)

    return over_ranks


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    if variant == "v0_12":
        return {GATHER: _of_default_group}
    return dict.fromkeys((GATHER,) if variant == "v0_13" else (GATHER, REDUCE, REDUCE_SCATTER), _of_group)
