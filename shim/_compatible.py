"""shim.compatible: a trainer says of its override of a patched method that it keeps the fix.

Works without torch, and whether or not anything is applied. check() reads the marks (shim._engine.models).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shim._errors import OptionError
from shim._version import __version__

__all__ = ["compatible", "marks_of"]

_NAME = "_shim_compatible"  # the attribute of a function that holds its marks: target -> version of shim

T = TypeVar("T")


def compatible(target: str, *, version: str | None = None) -> Callable[[T], T]:
    """Mark a function that overrides or replaces `target` as keeping what shim fixes there. Returns the same object.

        MTP = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer."

        class MyLayer(MultiTokenPredictionLayer):
            @shim.compatible(MTP + "_get_embeddings", version="0.1.0")
            def _get_embeddings(self, ...):

    target: the overridden method, or another target that the function keeps, as ``package.module:Qualified.name``. A
        function may have several marks.
    version: the version of shim that the function was written for. None: the running one. Write it out, so that it
        goes on saying what you tested with.

    check() believes a mark without trying the function, and says so in ``report[id].others``. Raises OptionError for
    a `target` or a `version` that is not of its form, and for an object that takes no mark.
    """
    module, _, qualname = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        raise OptionError(f"shim.compatible: target {target!r} is not of the form package.module:Qualified.name")
    if version is not None and not (isinstance(version, str) and version[:1].isdigit()):
        raise OptionError(f"shim.compatible: version {version!r} is no version of shim, such as {__version__!r}")

    def mark(function: T) -> T:
        inner = _function_in(function)
        marks = {**marks_of(inner), target: version or __version__}
        try:
            setattr(inner, _NAME, marks)
        except (AttributeError, TypeError) as error:
            raise OptionError(f"shim.compatible: {function!r} takes no mark: {error}") from error
        return function

    return mark


def marks_of(function: Any) -> dict[str, str]:
    """Target -> version of shim, as `compatible` marked the function, or one that it wraps with functools.wraps."""
    return dict(getattr(_function_in(function), "__dict__", {}).get(_NAME, {}))


def _function_in(function: Any) -> Any:
    """The function inside a staticmethod, a classmethod or a bound method."""
    return getattr(function, "__func__", function)
