"""A chunk of a model with other parameters, for functions that sum gradients of it (two patches of norms).

What a chunk has is seen in the walk over its parameters that upstream does itself. So nothing is kept that could get
old, and a step that sums nothing walks over nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Named = list[tuple[str, Any]]  # parameters by name


class Chosen:
    """Stands for a chunk. `choose` gets its named parameters whenever they are asked for, and returns those to have."""

    def __init__(self, chunk: Any, choose: Callable[[Named], Iterable[tuple[str, Any]]]) -> None:
        self._chunk, self._choose = chunk, choose

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        return self._choose([*self._chunk.named_parameters()])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


def owners(chunk: Any, name: str, weight: Any, child: str) -> list[Any]:
    """The modules of the chunk whose `child` has this weight, which is called `name`."""
    parts = name.split(".")
    try:
        return [chunk.get_submodule(".".join(parts[:i])) for i, part in enumerate(parts) if part == child]
    except AttributeError:  # names need not be paths: a chunk may give its parameters other ones
        modules = getattr(chunk, "modules", tuple)  # another patch may pass on something that stands for a chunk
        return [module for module in modules() if _has(getattr(module, child, None), weight)]


def _has(module: Any, weight: Any) -> bool:
    return module is not None and any(each is weight for each in module.parameters())
