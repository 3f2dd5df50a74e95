"""Triton kernels on a CPU, in Triton's own interpreter."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from shim._torch_names import find, required
from shim.testing.proof import CannotRunError

__all__ = ["interpreted"]

_LANGUAGE = "triton.language"


@contextlib.contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Within it, the Triton kernels that these modules hold run in the interpreter, on CPU tensors.

    TRITON_INTERPRET=1 would do so for the whole process, and only before the modules are imported. The interpreter adds
    a Python number to a bf16 value as if both were integers, so that a kernel that does so cannot be judged here.

    Raises CannotRunError if Triton is not installed.
    """
    if find_spec("triton") is None:
        raise CannotRunError("the kernels need triton, which is not installed")
    language: Any = import_module("triton.language")
    # Triton imports it at the first launch, and it wants compiled functions there.
    find("triton.experimental.gluon.language:__name__")
    wrapped = required("triton.runtime.interpreter:InterpretedFunction")
    compiled = required("triton.runtime.jit:JITFunction")
    with contextlib.ExitStack() as undo:
        for owner in _language():
            undo.callback(_restore, owner, dict(vars(owner)))
        for module in (*modules, language, language.standard):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, compiled):
                    undo.callback(setattr, module, name, kernel)
                    setattr(module, name, wrapped(kernel.fn))
        yield


def _language() -> Iterator[Any]:
    """The modules of triton.language and their classes, in which the interpreter leaves its functions."""
    classes: set[type] = set()
    for name, module in list(sys.modules.items()):
        if name == _LANGUAGE or name.startswith(f"{_LANGUAGE}."):
            yield module
            classes |= {v for v in vars(module).values() if isinstance(v, type) and v.__module__.startswith(_LANGUAGE)}
    yield from classes


def _restore(owner: Any, before: dict[str, Any]) -> None:
    # Names that the interpreter has added stay: it adds them only once.
    for name, value in before.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)
