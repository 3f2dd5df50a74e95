"""0.12 to 0.15: MTP layers refuse a packed row, although what is inside of them takes one.

The layer's forward runs on a view of the layer, and is told of no row. The one part of the view that must know of the
row gets it: the transformer layer (0.12, 0.13), or the method around it (0.14, 0.15), which a recompute calls again.
The row goes where that part goes, so a recompute has it too, whoever recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WithRow:
    """A callable of a layer that gets `row` as its packed_seq_params, whatever the caller passes."""

    def __init__(self, function: Callable[..., Any], put_row: Callable[..., Any], row: Any) -> None:
        self.function = function
        self.put_row = put_row
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.put_row(args, kwargs, self.row)
        return self.function(*args, **kwargs)


def view_of(layer: Any, **parts: Any) -> Any:
    """A second object with all that the module `layer` has, parameters and submodules too, but for `parts`.

    Written into its dictionary, where an attribute is found before a submodule of the same name. Not by copy.copy,
    which torch.compile cannot trace.
    """
    view = object.__new__(type(layer))
    vars(view).update(vars(layer), **parts)
    return view
