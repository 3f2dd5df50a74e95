"""The packed row of a layer's call, where its router finds it, in a recompute as well."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function
from shim.patches._views import view_with


class Row(NamedTuple):
    """A packed row, and the config of the layer that runs on it."""

    packed: Any
    config: Any


_ROW = Ambient(__name__)


def row_of_call() -> Row | None:
    return _ROW.value


def patch_layer_forward(original: Function) -> Function:
    """Holds the row during the call of a layer that balances sequences."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed_seq_params")
        # One kind of loss, or from 0.14 on a list of several.
        if packed is None or "seq_aux_loss" not in self.config.moe_router_load_balancing_type:
            return original(self, *args, **kwargs)
        return _ROW.call(Row(packed, self.config), original, self, *args, **kwargs)

    return forward


def patch_moe_forward(original: Function) -> Function:
    """A layer of experts that is recomputed by itself, outside of the transformer layer's call, keeps the row."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        row = _ROW.value
        if row is None or not self.moe_layer_recompute:
            return original(self, *args, **kwargs)
        name = "route" if hasattr(self, "route") else "router"  # `route` calls the router from 0.16 on
        routed = functools.partial(_ROW.call, row, getattr(self, name))
        return original(view_with(self, **{name: routed}), *args, **kwargs)

    return forward
