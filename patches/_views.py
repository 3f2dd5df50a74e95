"""Stand-ins for one call: a view of an object with other parts, and an object that is called otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def view_with(module: Any, **parts: Any) -> Any:
    """A view of `module` (an nn.Module, or a config): the same parameters and submodules, with `parts` replaced.

    The module does not change, and other threads see it as it is. What is set on the view is lost with it. An object of
    a class made in C, such as SimpleNamespace, is a TypeError.

    The parts go into the dictionary of the view, where an attribute comes before a submodule of the same name.
    torch.compile cannot trace copy.copy.
    """
    view = object.__new__(type(module))
    vars(view).update(vars(module), **parts)
    return view


class Called:
    """Stands for `of`, a module or any other callable. Its calls are those of `call`, all else is as `of` has it."""

    def __init__(self, of: Any, call: Callable[..., Any]) -> None:
        self._of, self._call = of, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)  # when it is asked: `of` need not have it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)
