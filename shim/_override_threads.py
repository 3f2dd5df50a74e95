"""Which thread a call belongs to, and which recomputes other threads are in the middle of."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["caller", "mark_caller", "reaches", "recomputing_elsewhere"]

_KEY = "shim.config_override.caller"  # in the state that autograd hands from the caller of backward to its own threads
_LIBRARIES = {"torch", "megatron", "transformer_engine", "numpy", "shim", *sys.stdlib_module_names}
_MOST = 500_000  # objects looked at before a config counts as reached
_INSIDES = (types.CodeType, types.FrameType, types.TracebackType, types.ModuleType)
_NOT_FOLLOWED = (str, bytes, int, float, complex, *_INSIDES)


def _state() -> Any:
    state = getattr(sys.modules.get("torch"), "_C", None)
    return state if hasattr(state, "_stash_obj_in_tls") else None


def caller() -> int:
    """The thread on whose behalf this one runs: in a thread of autograd that which called backward, and waits for it.

    Without this function of torch, which is private, a thread of autograd is one of its own.
    """
    state = _state()
    if state is not None and state._is_key_in_tls(_KEY):
        return int(state._get_obj_in_tls(_KEY))
    return threading.get_ident()


def mark_caller() -> None:
    """From now on what this thread calls backward for belongs to it."""
    state = _state()
    if state is not None and not state._is_key_in_tls(_KEY):
        state._stash_obj_in_tls(_KEY, threading.get_ident())


def recomputing_elsewhere(
    codes: set[types.CodeType], config: Any, settled: Callable[[types.FrameType], bool] = lambda frame: False
) -> bool:
    """Whether another thread is inside of a function that one of `codes` runs again, and that reaches `config`.

    Seen from the threads' stacks, so that checkpoints need not say anything while they run. `settled` says of a frame
    inside of the function whether that recompute has its own way to see a conflict.
    """
    torch = sys.modules.get("torch")
    backward = torch.autograd.backward.__code__ if torch is not None else None
    for thread, top in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        above: list[types.FrameType] = []
        inner = 0  # where the frames of the next recompute inside of this one end
        for frame in _stack(top):
            # With torch.autograd.backward above, the checkpoint has run its function and is at its gradients.
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
    """Whether `config` can be found from `roots`: over attributes, items, closures, methods of classes, and the globals
    that functions name; those of libraries, which hold no configs, are left out. True where the search grows too long.
    """
    seen: dict[int, Any] = {}  # keeps what it has seen, so that no address is used twice
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
    modules = [value for value in found if type(value) is types.ModuleType and not _of_library(value.__name__)]
    return found + [vars(module)[name] for module in modules for name in names if name in vars(module)]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
