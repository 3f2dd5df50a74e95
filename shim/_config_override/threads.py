"""Which thread and task a call belongs to, and which recomputes other threads are inside."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shim._threads import current_task

__all__ = ["Caller", "caller", "reaches", "recomputing_elsewhere"]

# The module of the first Python frame in an autograd thread that recomputes
_OF_AUTOGRAD = {"torch.autograd.function", "torch.utils.checkpoint", "transformer_engine.pytorch.distributed"}
_LIBRARIES = {"torch", "megatron", "transformer_engine", "numpy", "shim", *sys.stdlib_module_names}
_MOST = 500_000  # after this many objects a config counts as reached
_INSIDES = (types.CodeType, types.FrameType, types.TracebackType, types.ModuleType)
_NOT_FOLLOWED = (str, bytes, int, float, complex, *_INSIDES)


class Caller(NamedTuple):
    """The claimant of a value: a thread, and the task of asyncio that runs in it."""

    thread: int
    task: Any

    def waits(self) -> bool:
        """Whether the task cannot go on until the running code of its thread is done."""
        asyncio = sys.modules.get("asyncio")
        if asyncio is None:
            return True
        if self.task is not None and not self.task.done():
            return asyncio.current_task(self.task.get_loop()) is self.task
        try:  # claimed outside the loop, or in a fixture's task: every task of the loop runs inside the claim
            return len(asyncio.all_tasks(asyncio.get_running_loop())) < 2
        except RuntimeError:  # no loop is running in this thread
            return True


def caller() -> Caller:
    """The caller that this code runs for. An autograd thread runs for the thread that called backward and waits.

    The answer comes from the threads' stacks. State that autograd passes to its threads would not do: the process
    aborts if a thread ends with such state. If several threads are in a backward, the stacks cannot tell which of them
    waits, so the autograd thread counts as a separate caller.
    """
    thread, frames = threading.get_ident(), sys._current_frames()
    if _is_of_autograd(frames[thread]):
        # megatron-core calls autograd directly, so the name of the called function is the only evidence.
        backward = [
            other
            for other, top in frames.items()
            if any("run_backward" in frame.f_code.co_names for frame in _stack(top)) and not _is_of_autograd(top)
        ]
        return Caller(backward[0] if len(backward) == 1 else thread, None)
    return Caller(thread, current_task())


def _is_of_autograd(top: types.FrameType) -> bool:
    *_, first = _stack(top)
    return first.f_globals.get("__name__") in _OF_AUTOGRAD


def recomputing_elsewhere(
    codes: set[types.CodeType], config: Any, settled: Callable[[types.FrameType], bool] = lambda frame: False
) -> bool:
    """Whether another thread is inside a function that one of `codes` runs again and that reaches `config`.

    The answer comes from the threads' stacks, so running checkpoints need no bookkeeping. `settled` tells for a frame
    inside the function whether that recompute detects a conflict itself.
    """
    torch = sys.modules.get("torch")
    backward = torch.autograd.backward.__code__ if torch is not None else None
    for thread, top in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        above: list[types.FrameType] = []
        inner = 0  # index of the first frame outside the nested recompute
        for frame in _stack(top):
            # torch.autograd.backward above: the checkpoint has run its function and computes gradients.
            over = above and above[-1].f_code is backward
            above.append(frame)
            if frame.f_code in codes:
                if not over and not any(map(settled, above[inner:])) and reaches(_locals(above), config):
                    return True
                inner = len(above)
    return False


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _locals(frames: Iterable[types.FrameType]) -> list[Any]:
    ours = __name__.partition(".")[0]
    theirs = [frame for frame in frames if str(frame.f_globals.get("__name__")).partition(".")[0] != ours]
    return [value for frame in theirs for value in list(frame.f_locals.values())]


def reaches(roots: Iterable[Any], config: Any) -> bool:
    """Whether `config` is reachable from `roots`, by attributes, items, closures, methods and named globals.

    Globals of libraries are left out, because libraries hold no configs. True if the search grows too long.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    left = list(roots)
    while left:
        value = left.pop()
        if value is config:
            return True
        if id(value) not in seen:
            seen[id(value)] = value
            if len(seen) > _MOST:
                return True
            left.extend(_next(value))
    return False


def _next(value: Any) -> Iterable[Any]:
    kind = type(value)
    if value is None or issubclass(kind, _NOT_FOLLOWED):
        return ()
    if issubclass(kind, weakref.ref):
        return (value(),)
    if issubclass(kind, type):
        names = type.__getattribute__(value, "__dict__")
        return () if _of_library(names.get("__module__")) else (*names.values(), *value.__bases__)
    if kind is types.FunctionType:
        inside = (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        return (*inside, *_named_globals(value))
    return gc.get_referents(value)


def _of_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES | {"builtins"}


def _named_globals(function: types.FunctionType) -> list[Any]:
    if _of_library(function.__globals__.get("__name__")):
        return []
    names = set(_names(function.__code__))
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    cells = [value for cell in function.__closure__ or () for value in gc.get_referents(cell)]
    imported = [sys.modules[name] for name in names if name in sys.modules]  # the function may import them
    reached, left = list(found), [*found, *cells, *imported]
    seen: set[int] = set()
    while left:
        module = left.pop()
        if isinstance(module, types.ModuleType) and id(module) not in seen and not _of_library(module.__name__):
            seen.add(id(module))
            inside = [vars(module)[name] for name in names if name in vars(module)]
            reached += inside
            left += inside
    return reached


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
