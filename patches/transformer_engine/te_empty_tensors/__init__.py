"""Optimizer steps and gradient norms of Transformer Engine bear tensors without elements.

What is wrong: MultiTensorApply gives lists of tensors to a compiled loop, for FusedAdam and FusedSGD, and for
megatron-core's gradient norm, its clipping and its copies of main weights. A rank owns nothing of a weight that has
fewer rows than there are ranks: under FSDP2 and Megatron-FSDP, and with LoRA of low rank.

1. (2.1 to 2.17) The loop launches its kernels at the last chunk of the last tensor, and a tensor without elements has
   no chunk. If it is the last one, all tensors that wait for a launch are lost: their weights do not move, and the norm
   lacks them.
2. (2.1 to 2.17) If it takes the last place in the loop's table, such as the 36th of FusedAdam, the next tensors are
   written behind the table. A GPU reports an illegal memory access, or the kernel uses wrong addresses.
3. (2.18 to 2.20) A norm of tensors that all have no elements is None. megatron-core's get_grad_norm_fp32 raises a
   TypeError. The norms of the single tensors lack those without elements, so that the others move up.

The patch: for 1 and 2 the operation gets the lists without these tensors. If nothing is left it gets one of them,
which launches nothing. Norms of single tensors get zeros in their places. For 3 the norm is zero. Lists in which every
tensor has elements go to the operation as they are.

- The first list decides about a place, as it does in the compiled loop.
- Clipping by an infinite norm is megatron-core's own code. It raises an error if a gradient has no elements.

Beside shim a trainer need not keep empty shards from the optimizer, as NeMo Automodel and Megatron-FSDP do.

Upstream: pull request 3212 fixed 1 and 2 in 2.18, and brought 3.

Delete when: Transformer Engine 2.17 is not supported, and a later release has fixed 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

CALL = "transformer_engine.pytorch.optimizers.multi_tensor_apply:MultiTensorApply.__call__"
# The operations that return norms, and how many arguments they take before `per_tensor`.
NORMS = {"multi_tensor_l2norm": 0, "multi_tensor_unscale_l2norm": 1}


def _norms_in_place(result: Any, filled: Sequence[int], places: int) -> Any:
    """With a zero for each tensor that the operation did not see, if it has returned the norms of single tensors."""
    if not isinstance(result, tuple) or len(result) != 2 or result[1].numel() != len(filled):
        return result
    norms = dict(zip(filled, result[1].split(1), strict=True))
    zero = result[1].new_zeros(1)
    return result[0], torch.cat([norms.get(place, zero) for place in range(places)])


def _filled_alone(op: Function) -> Function:
    """Problems 1 and 2: the operation, on lists without the tensors that have no elements."""

    @functools.wraps(op, updated=())
    def filled_alone(chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], *args: Any) -> Any:
        sizes = [tensor.numel() for tensor in tensor_lists[0]]
        if all(sizes) or any(len(tensors) != len(sizes) for tensors in tensor_lists):
            return op(chunk_size, noop_flag, tensor_lists, *args)
        filled = [place for place, size in enumerate(sizes) if size] or [0]
        lists = [[tensors[place] for place in filled] for tensors in tensor_lists]
        return _norms_in_place(op(chunk_size, noop_flag, lists, *args), filled, len(sizes))

    return filled_alone


def _without_empty(original: Function) -> Function:
    op_of, with_op = argument(original, "op"), replacing(original, "op")

    @functools.wraps(original)
    def __call__(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_op(args, kwargs, _filled_alone(op_of(args, kwargs)))
        return original(*args, **kwargs)

    return __call__


def _norm_of_nothing(original: Function) -> Function:
    """Problem 3."""
    op_of, lists_of = argument(original, "op"), argument(original, "tensor_lists")
    rest = 4  # self, op, noop_flag_buffer and tensor_lists come before the arguments of the operation

    @functools.wraps(original)
    def __call__(*args: Any, **kwargs: Any) -> Any:
        before = NORMS.get(getattr(op_of(args, kwargs), "__name__", ""))
        if before is None:
            return original(*args, **kwargs)
        first = lists_of(args, kwargs)[0]  # upstream puts other lists in the place of these, and local shards into them
        result = original(*args, **kwargs)
        if result is None and first:
            per_tensor = len(args) > rest + before and args[rest + before]
            zero = first[0].new_zeros(1, dtype=torch.float32)
            return zero, zero.new_zeros(len(first) if per_tensor else 0)
        if result is None or result[1].numel() in (0, len(first)):
            return result
        return _norms_in_place(result, [place for place, tensor in enumerate(first) if tensor.numel()], len(first))

    return __call__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CALL: _without_empty if variant == "v2_1" else _norm_of_nothing}
