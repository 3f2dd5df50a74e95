"""Whether somebody else's object calls shim's function, learnt from the first calls where reading does not tell."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

__all__ = ["CallWatch"]

TOOLS = (3, 4, 5)  # of sys.monitoring; the others belong to debuggers, coverage, profilers and optimizers


class CallWatch:
    """Watches calls of shim's functions with sys.monitoring, from Python 3.12 on.

    Only the code of these functions is watched, and only until the answer is known. Nothing is written to, and nothing
    else becomes slower. On an older Python nobody watches, and the answer stays unknown.
    """

    def __init__(self) -> None:
        self._tool: int | None = None
        self._watched: dict[types.CodeType, list[tuple[types.FunctionType, types.CodeType]]] = {}
        self._seen: set[tuple[types.CodeType, types.CodeType]] = set()  # codes of foreign functions and of shim's

    def saw(self, foreign: Any, ours: Any) -> bool:
        """Whether a call of `foreign` has reached `ours`. If not, watches the calls from now on."""
        code = _code_of(foreign)
        if code is None or type(ours) is not types.FunctionType:
            return False
        if (code, ours.__code__) in self._seen:
            return True
        pairs = self._watched.setdefault(ours.__code__, [])
        if sys.version_info >= (3, 12) and (ours, code) not in pairs and self._has_tool():
            pairs.append((ours, code))
            events = sys.monitoring.events
            sys.monitoring.set_local_events(self._tool, ours.__code__, events.PY_START)  # type: ignore[arg-type]
        return False

    def _has_tool(self) -> bool:
        if sys.version_info >= (3, 12) and self._tool is None:
            free = [tool for tool in TOOLS if sys.monitoring.get_tool(tool) is None]
            if not free:
                return False
            self._tool = free[0]
            sys.monitoring.use_tool_id(self._tool, "megatron-shim")
            sys.monitoring.register_callback(self._tool, sys.monitoring.events.PY_START, self._started)
        return self._tool is not None

    def _started(self, code: types.CodeType, offset: int) -> object:
        """Called where a watched function starts: looks for the foreign function among its callers."""
        frame: types.FrameType | None = sys._getframe(1)
        pairs = [pair for pair in self._watched.get(code, ()) if frame is not None and _is_call_of(pair[0], frame)]
        frame = None if frame is None else frame.f_back
        while frame is not None and pairs:
            found = [pair for pair in pairs if pair[1] is frame.f_code]
            for ours, foreign in found:
                self._seen.add((foreign, code))
                self._watched[code].remove((ours, foreign))
            pairs = [pair for pair in pairs if pair not in found]
            frame = frame.f_back
        if self._watched.get(code) or sys.version_info < (3, 12):
            return None
        self.forget(code)
        return sys.monitoring.DISABLE

    def forget(self, code: types.CodeType | None = None) -> None:
        """Stop to watch one function of shim's, or all."""
        for known in [code] if code is not None else list(self._watched):
            self._watched.pop(known, None)
            if sys.version_info >= (3, 12) and self._tool is not None:
                sys.monitoring.set_local_events(self._tool, known, 0)
        if sys.version_info >= (3, 12) and self._tool is not None and not self._watched:
            sys.monitoring.register_callback(self._tool, sys.monitoring.events.PY_START, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None


def _code_of(foreign: Any) -> types.CodeType | None:
    """The code that a call of an object runs, if it is written in Python."""
    if issubclass(type(foreign), functools.partial):
        return _code_of(foreign.func)
    wrapper = getattr(foreign, "_self_wrapper", None)  # of wrapt
    call = next((c.__dict__["__call__"] for c in type(foreign).__mro__ if "__call__" in c.__dict__), None)
    found = (getattr(item, "__code__", None) for item in (wrapper, foreign, call) if item is not None)
    return next((code for code in found if isinstance(code, types.CodeType)), None)


def _is_call_of(function: types.FunctionType, frame: types.FrameType) -> bool:
    """Whether a frame runs this very function, and not another one with the same code."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(frame.f_locals.get(name) is cell.cell_contents for name, cell in cells)
