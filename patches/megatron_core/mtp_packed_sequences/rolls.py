"""The roll for all releases, and the loss mask for the roll.

Up to 0.15 roll_tensor does not get the packed row, and uses the row of the step. From 0.16 on it passes a packed row to
_roll_tensor_packed_seq, a loop over sequences that sends messages for each. One roll replaces the loop. The roll itself
is in shim.ops.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function, add_parameters, argument, replacing
from shim.patches.megatron_core._context_parallel_rows import is_parallel, roll_unpacked_on_rank
from shim.patches.megatron_core._rolled_masks import handed_out
from shim.patches.megatron_core.mtp_packed_sequences.step import (
    THREAD,
    group_of,
    roll_row,
    valid_tokens,
)

Options = Mapping[str, Any]


def _returned(rolled: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The result of upstream's rolls. `count` is the sum of `rolled`: for a loss mask, the number of targets."""
    # If every target is masked, upstream divides zero by the count. A count of one avoids NaN.
    divides = THREAD.step is not None and THREAD.step.counts_divide
    return rolled, count + (count == 0) if divides else count


def patch_roll_tensor(original: Function, options: Options) -> Function:
    """Up to 0.15: rolls by the row of the call, else by the row of the step."""
    takes_group = "cp_group" in inspect.signature(original).parameters  # 0.14, 0.15

    @functools.wraps(original)
    def roll_tensor(
        tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> Any:
        if tensor is None:
            return None, None
        found = handed_out(tensor)  # by mtp-loss-cp
        if found is not None:
            return found
        step = THREAD.step
        row = step.row if packed_seq_params is None and step is not None else packed_seq_params
        if row is not None:
            rolled = roll_row(tensor, shifts, dims, row, group_of(row, cp_group), options["partition"])
        elif takes_group:
            return _returned(*original(tensor, shifts, dims, cp_group))
        elif step is not None and is_parallel(step.group):
            rolled = roll_unpacked_on_rank(tensor, dims, step.group)
        else:
            return _returned(*original(tensor, shifts, dims))
        return _returned(rolled, rolled.sum())

    add_parameters(roll_tensor, original, "cp_group", "packed_seq_params")
    return roll_tensor


def patch_count_of_roll_tensor(original: Function, options: Options) -> Function:
    """0.16 passes packed rows on. For unpacked rows, makes the count safe to divide by."""
    row_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def roll_tensor(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs["tensor"]
        if tensor is None:
            return None, None
        result = original(*args, **kwargs)
        return result if row_of(args, kwargs) is not None else _returned(*result)

    return roll_tensor


def patch_roll_tensor_packed_seq(original: Function, options: Options) -> Function:
    """From 0.16: replaces the loop over sequences. A call gets no sum without return_sum, which came with 0.20."""

    @functools.wraps(original)
    def _roll_tensor_packed_seq(
        tensor: Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None, return_sum: bool = True
    ) -> Any:
        row = packed_seq_params
        # Mixing of hidden states (0.20) rolls what this rank has of a row. It wants no sum then, and passes no group.
        on_rank = cp_group is None and not return_sum
        group = None if on_rank else group_of(row, cp_group)
        rolled = roll_row(tensor, shifts, dims, row, group, options["partition"])
        return _returned(rolled, rolled.sum()) if return_sum else (rolled, None)

    return _roll_tensor_packed_seq


def with_loss_mask(original: Function, options: Options) -> Callable[..., tuple[Any, Any]]:
    """A function that adds a mask of all valid tokens to the arguments of a call without a loss mask.

    The mask has the dtype and shape of `like`. Padding of `row`, which is cut over `group`, is zero.
    """
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")

    def prepare(args: Any, kwargs: Any, like: Tensor, row: Any, group: Any) -> tuple[Any, Any]:
        if mask_of(args, kwargs) is not None:
            return args, kwargs
        return put_mask(args, kwargs, valid_tokens(like, row, group, options["partition"]))

    return prepare
