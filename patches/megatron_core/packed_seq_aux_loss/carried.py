"""The packed row of a layer's call, where its router finds it, in a recompute as well."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shim.patches._arguments import Function
from shim.patches._named import Named
from shim.patches._views import view_with


class Row(NamedTuple):
    """A packed row, and the config of the layer that runs on it."""

    packed: Any
    config: Any


class _Thread(Named, threading.local):
    row: Row | None = None


_NOW = _Thread()


def row_of_call() -> Row | None:
    return _NOW.row


@contextlib.contextmanager
def _held(row: Row) -> Iterator[None]:
    before, _NOW.row = _NOW.row, row
    try:
        yield
    finally:
        _NOW.row = before


def patch_layer_forward(original: Function) -> Function:
    """Holds the row during the call of a layer that balances sequences."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed_seq_params")
        # One kind of loss, or from 0.14 on a list of several.
        if packed is None or "seq_aux_loss" not in self.config.moe_router_load_balancing_type:
            return original(self, *args, **kwargs)
        with _held(Row(packed, self.config)):
            return original(self, *args, **kwargs)

    return forward


def patch_moe_forward(original: Function) -> Function:
    """A layer of experts that is recomputed by itself, outside of the transformer layer's call, keeps the row."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        row = _NOW.row
        if row is None or not self.moe_layer_recompute:
            return original(self, *args, **kwargs)
        name = "route" if hasattr(self, "route") else "router"  # `route` calls the router from 0.16 on
        return original(view_with(self, **{name: _with_row(getattr(self, name), row)}), *args, **kwargs)

    return forward


def _with_row(route: Callable[..., Any], row: Row) -> Callable[..., Any]:
    def routed(*args: Any, **kwargs: Any) -> Any:
        with _held(row):
            return route(*args, **kwargs)

    return routed
