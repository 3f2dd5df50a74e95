"""A view of a module or a config, for a call that is to see other parts in it. The object itself does not change."""

from __future__ import annotations

from typing import Any


def view_with(module: Any, **parts: Any) -> Any:
    """A view of `module` (an nn.Module, or a config): the same parameters and submodules, with `parts` replaced.

    The parts go into the dictionary of the view, where an attribute comes before a submodule of the same name.
    torch.compile cannot trace copy.copy.
    """
    view = object.__new__(type(module))
    vars(view).update(vars(module), **parts)
    return view
