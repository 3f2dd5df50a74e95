"""The group over which broadcast_data sends the sizes of what it sends.

What is wrong (0.13 to 0.20): tensor_parallel.broadcast_data takes a `tp_group`, and sends the tensors over it. Their
sizes go over the global tensor-parallel group all the same. If the two groups differ, as for a second model with
another layout, a rank takes the sizes of another rank's tensors:
- rows come out cut off in silence, or as a view that does not fit,
- a rank that has no data is asked for its data, and crashes,
- ranks that do not take part are waited for,
- without global groups the call raises, although it was given its own.

What the patch does: sizes go over the group of the call. Without a `tp_group` the global one stays, for both messages.
There are as many messages as on stock, of the same sizes.

Upstream: open, also on the main branch.

Delete when: no supported release sends the sizes over another group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing

BROADCAST = "megatron.core.tensor_parallel.data:broadcast_data"
SIZES = "megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries"

_GROUP = Ambient(__name__)


def _broadcast_data(original: Function) -> Function:
    group_of = argument(original, "tp_group")

    @functools.wraps(original)
    def broadcast_data(*args: Any, **kwargs: Any) -> Any:
        return _GROUP.call(group_of(args, kwargs), original, *args, **kwargs)

    return broadcast_data


def _sizes(original: Function) -> Function:
    group_of, with_group = argument(original, "tp_group"), replacing(original, "tp_group")

    @functools.wraps(original)
    def _build_key_size_numel_dictionaries(*args: Any, **kwargs: Any) -> Any:
        if _GROUP.value is not None and group_of(args, kwargs) is None:
            args, kwargs = with_group(args, kwargs, _GROUP.value)
        return original(*args, **kwargs)

    return _build_key_size_numel_dictionaries


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BROADCAST: _broadcast_data, SIZES: _sizes}
