"""All-reduces over tensor-parallel ranks of a tensor that is not contiguous.

What is wrong (0.12 to 0.18): the all-reduce of the tensor-parallel mappings sums a contiguous copy, and returns the
tensor that it was given. So a transposed, sliced or expanded tensor silently keeps the part of its rank.
- reduce_from_tensor_model_parallel_region returns partial sums.
- copy_to_tensor_model_parallel_region has the same in backward: it returns the gradient of one rank.
The layers of megatron-core pass contiguous tensors. Models and adapters of one's own meet it, for example those that
compute batch first, and transpose on the way in or out.

The patch passes on the copy, so that it is what is summed and returned. A contiguous tensor is still reduced in place
and returned itself, and one rank alone still makes no copy.

Upstream: Megatron-LM issue 5337, fixed by pull request 5338 in 0.19.

Delete when: the releases before 0.19 are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

REDUCE = "megatron.core.tensor_parallel.mappings:_reduce"

Several = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]


def _of_default_group(original: Function) -> Function:
    def several(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        from megatron.core import parallel_state

        return bool(parallel_state.get_tensor_model_parallel_world_size() > 1)

    return _of_contiguous(original, several)


def _of_group(original: Function) -> Function:
    group_of = argument(original, "group")

    def several(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        group = group_of(args, kwargs)
        return group is not None and group.size() > 1

    return _of_contiguous(original, several)


def _of_contiguous(original: Function, several: Several) -> Function:
    input_of, with_input = argument(original, "input_"), replacing(original, "input_")

    @functools.wraps(original)
    def _reduce(*args: Any, **kwargs: Any) -> Any:
        if several(args, kwargs):
            # A tensor that is contiguous is its own copy.
            args, kwargs = with_input(args, kwargs, input_of(args, kwargs).contiguous())
        return original(*args, **kwargs)

    return _reduce


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {REDUCE: {"v0_12": _of_default_group, "v0_13": _of_group}[variant]}
