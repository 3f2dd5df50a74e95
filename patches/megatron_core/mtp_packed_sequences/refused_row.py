"""0.12 to 0.15: MTP layers refuse a packed row, although the modules inside take one.

The layer's forward runs on a view of the layer and gets no row. One part of the view gets the packed row: the
transformer layer (0.12, 0.13), or the method around it (0.14, 0.15), which a recompute calls again. The part carries
the row with it, so any recompute of the part has the row too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WithRow:
    """A callable of a layer that always gets `row` as its packed_seq_params."""

    def __init__(self, function: Callable[..., Any], put_row: Callable[..., Any], row: Any) -> None:
        self.function = function
        self.put_row = put_row
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.put_row(args, kwargs, self.row)
        return self.function(*args, **kwargs)
