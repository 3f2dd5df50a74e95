"""Triton kernels on tensors of the pretended device, by Triton's interpreter."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from shim._torch_names import required

from ..interpreted import interpreted
from .counts import uncounted
from .state import state
from .tensor import DeviceTensor, values_of, without_modes
from .trees import with_tensors

__all__ = ["kernels_interpreted"]


@contextlib.contextmanager
def kernels_interpreted() -> Iterator[None]:
    """Within it, the launch of a compiled Triton kernel is checked, counted and interpreted. Nothing without Triton."""
    if find_spec("triton") is None:
        yield
        return
    compiled: Any = required("triton.runtime.jit:JITFunction")
    original = compiled.run
    with contextlib.ExitStack() as stack:
        launcher = _Launcher(stack)

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
            launcher.launch(kernel, grid, args, kwargs)

        compiled.run = run
        stack.callback(setattr, compiled, "run", original)
        yield


class _Launcher:
    """Interprets kernels in copies of their modules, so that the modules keep the compiled ones."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._ready = False
        self._spaces: dict[str, dict[str, Any]] = {}

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = kernel.fn.__name__
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for tensor in given:
            if not isinstance(tensor, DeviceTensor) and not state().is_pinned(tensor):
                raise state().fault(f"a tensor of the CPU {tuple(tensor.shape)} in the Triton kernel {name}")
        state().count("launches", name)
        state().count("bytes_moved", name, sum(values_of(tensor).nbytes for tensor in given))
        values = with_tensors(values_of, (args, kwargs))
        graph = state().capture

        def run(values: Any) -> None:
            with uncounted(), without_modes():
                self._interpreted(kernel)[grid](*values[0], **values[1])

        if graph is not None:
            graph.will_write(map(values_of, given))
            graph.add_kernel(run, values)
        run(values)

    def _interpreted(self, kernel: Any) -> Any:
        if not self._ready:  # puts the library of Triton into the interpreter
            self._stack.enter_context(interpreted())
            self._ready = True
        return self._space(sys.modules[kernel.fn.__module__])[kernel.fn.__name__]

    def _space(self, module: ModuleType) -> dict[str, Any]:
        """The globals of a module, with interpreted functions for compiled ones that see each other."""
        if module.__name__ in self._spaces:
            return self._spaces[module.__name__]
        wrapped: Any = required("triton.runtime.interpreter:InterpretedFunction")
        compiled: Any = required("triton.runtime.jit:JITFunction")
        space = self._spaces[module.__name__] = dict(vars(module))
        for name, value in list(space.items()):
            if isinstance(value, compiled):
                space[name] = wrapped(_with_globals(value.fn, space))
        return space


def _with_globals(function: Callable[..., Any], space: dict[str, Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    copied = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = function.__kwdefaults__, function.__annotations__
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied
