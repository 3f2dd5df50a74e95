"""Checkpoints of megatron-core 0.12 with torch 2.7 and later.

What is wrong (0.12): its writer of checkpoints calls `_write_item` of torch.distributed.checkpoint.filesystem. Since
torch 2.7 that function asks for serialization_format, without a default. So dist_checkpointing.save fails with a
TypeError.

What the patch does: the name in megatron-core's module passes TORCH_SAVE, the format of torch up to 2.6, so the files
are those of older torch. torch's own name stays as it is. With torch up to 2.6 the patch does nothing.

Upstream: fixed in 0.13.

Delete when: 0.12 is not supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

WRITE_ITEM = "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item"
FORMAT = "serialization_format"


def _write_item(original: Function) -> Function:
    parameters = inspect.signature(original).parameters
    if FORMAT not in parameters or parameters[FORMAT].default is not inspect.Parameter.empty:
        return original
    format_of, with_format = argument(original, FORMAT), replacing(original, FORMAT)

    @functools.wraps(original)
    def _write_item(*args: Any, **kwargs: Any) -> Any:
        if format_of(args, kwargs) is None:
            from torch.distributed.checkpoint.filesystem import SerializationFormat

            args, kwargs = with_format(args, kwargs, SerializationFormat.TORCH_SAVE)
        return original(*args, **kwargs)

    return _write_item


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's function and returns the replacement."""
    return {WRITE_ITEM: _write_item}
