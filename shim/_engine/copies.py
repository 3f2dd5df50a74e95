"""Models whose classes come from another copy of a package than the one that the plan is for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from shim._engine.aliases import namespace_of
from shim._engine.states import UNSETTLED, Claim
from shim._planning.plan import Plan
from shim._releases.detect import DISTRIBUTIONS, PATCHED, same_place

__all__ = ["of_copies"]

_CONCERNED = (*UNSETTLED, "upstream", "not-needed", "not-installed", "out-of-range")
_PACKAGES = tuple(DISTRIBUTIONS[distribution].package for distribution in PATCHED)
REMEDY = "build the model from the copy that `import` gives, or call shim.apply() once that is the one on sys.path"


def of_copies(models: list[Any], plan: Plan) -> Iterator[Claim]:
    """That nothing can be told of a model with classes of a copy that the plan is not for."""
    for distribution in PATCHED:
        package = DISTRIBUTIONS[distribution].package
        installed = plan.environment.installed.get(distribution)
        found = next(_of_another_copy(models, package, None if installed is None else installed.location), None)
        if found is None:
            continue
        reason = f"the model has {found}, a copy of {package} that the plan is not for"
        for id in plan.decisions:
            if plan.matrix.patches[id].distribution == distribution:
                yield Claim(id, "unknown", reason, REMEDY, replaces=_CONCERNED)


def _of_another_copy(models: list[Any], package: str, location: str | None) -> Iterator[str]:
    seen: set[type] = set()
    for model in models:
        for module in model.modules():
            for cls in type(module).__mro__:
                if cls in seen or _package_of(cls.__module__) != package:
                    continue
                seen.add(cls)
                file = _file_of(cls)
                inside = cls.__module__[f".{cls.__module__}.".index(f".{package}.") :].replace(".", os.sep)
                is_there = file.endswith((f"{os.sep}{inside}.py", os.path.join(os.sep + inside, "__init__.py")))
                # A class that other code makes in the name of upstream's module lies elsewhere, and is no copy of it.
                if is_there and (location is None or not _is_below(file, location)):
                    yield f"{cls.__qualname__} of {file}"


def _package_of(module: str) -> str | None:
    """The package whose copy a module may be of: the first in its name.

    megatron.core.extensions.transformer_engine is a module of megatron-core.
    """
    name = f".{module}."
    places = {name.index(f".{package}."): package for package in _PACKAGES if f".{package}." in name}
    return places[min(places)] if places else None


def _file_of(cls: type) -> str:
    """The file that defines a class, by its functions, which know it without sys.modules. "" if none says so."""
    home = sys.modules.get(cls.__module__)
    known = None if home is None else namespace_of(home)
    if known is not None and known.get(cls.__qualname__.partition(".")[0]) is not None and known.get("__file__"):
        return str(known["__file__"])
    functions = (value for value in vars(cls).values() if type(value) is FunctionType)
    return next((f.__code__.co_filename for f in functions if f.__module__ == cls.__module__), "")


def _is_below(file: str, location: str) -> bool:
    place = os.path.dirname(file)
    while place and place != os.path.dirname(place):
        if place == location:
            return True
        if os.path.basename(place) == os.path.basename(location) and same_place(place, location):
            return True
        place = os.path.dirname(place)
    return False
