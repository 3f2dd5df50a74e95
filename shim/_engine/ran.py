"""Which patches' functions have run in this process. Nothing is added to them, and none of their calls costs more.

- Python 3.12 and later: sys.monitoring tells the first start of a function, and is switched off for that function then.
- Python 3.11: the interpreter rewrites the code of a function at its eighth call, and that is looked for when asked.
- Python 3.10 shows neither, so nothing is known.

A function that torch.compile has traced into a graph does not run itself, and is not seen.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from shim._engine.aliases import unwrap

__all__ = ["HAVE_RUN", "Ran"]

_OTHERS = ("megatron", "transformer_engine", "torch")  # whose functions a factory may pass on or wrap with
_MONITORING: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
HAVE_RUN = "have run" if _MONITORING is not None else "have run eight times or more"
_NAME = "megatron-shim"
_TOOLS = (4, 3)  # ids that debuggers, coverage and profilers leave to others


class Ran:
    """Codes of patches' functions, and the ids of patches of which one has run. Called under the engine's lock.

    A code that functions of several patches share, because one `def` has made them, tells nothing of either. Codes are
    not copied to tell them apart: torch keeps what it has compiled with a code, and would compile a copy anew.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        # By id() of a code: the code, its patch (None: several), and the code as the interpreter had it at first.
        self._watched: dict[int, tuple[types.CodeType, str | None, bytes]] = {}
        self._tool: int | None = None
        self._blind = False  # whether others had taken all tools, so that nothing was watched

    def ids(self) -> frozenset[str] | None:
        """The patches of which a function was seen to run. None if this interpreter does not show it."""
        if not _is_shown() or self._blind:
            return None
        if _MONITORING is None:
            for code, patch, before in self._watched.values():
                if patch is not None and patch not in self._seen and _as_run(code) != before:
                    self._seen.add(patch)
        return frozenset(self._seen)

    def rest(self) -> None:
        """Watch nothing any more, because nothing is in force, and give the tool of sys.monitoring back."""
        self.ids()
        if self._tool is not None:
            for code, _, _ in self._watched.values():
                _MONITORING.set_local_events(self._tool, code, 0)
            _MONITORING.free_tool_id(self._tool)
            self._tool = None
        self._watched.clear()

    def watch(self, patch: str, value: Any) -> None:
        """Look out for calls of what a factory has just made."""
        if patch in self._seen or not _is_shown() or not self._has_tool():
            return
        for function in _own_functions(value):
            code = function.__code__
            known = self._watched.get(id(code))
            if known is not None:
                if known[1] not in (patch, None):
                    self._watched[id(code)] = code, None, known[2]
                continue
            self._watched[id(code)] = code, patch, b"" if _MONITORING is not None else _as_run(code)
            if _MONITORING is not None:
                _MONITORING.set_local_events(self._tool, code, _MONITORING.events.PY_START)

    def _has_tool(self) -> bool:
        """Take a tool of sys.monitoring, if one is needed and there is one."""
        if _MONITORING is None:
            return True
        if self._tool is None:
            names = {tool: _MONITORING.get_tool(tool) for tool in _TOOLS}
            free = next((tool for tool in _TOOLS if names[tool] in (None, _NAME)), None)
            if free is not None:
                if names[free] is None:
                    _MONITORING.use_tool_id(free, _NAME)
                _MONITORING.register_callback(free, _MONITORING.events.PY_START, self._started)
                self._tool = free
        self._blind = self._tool is None
        return not self._blind

    def _started(self, code: types.CodeType, offset: int) -> Any:
        known = self._watched.get(id(code))
        if known is not None and known[1] is not None:
            self._seen.add(known[1])
        return _MONITORING.DISABLE


def _is_shown() -> bool:
    return _MONITORING is not None or (sys.version_info >= (3, 11) and sys.implementation.name == "cpython")


def _as_run(code: types.CodeType) -> bytes:
    found: bytes = code._co_code_adaptive  # type: ignore[attr-defined]
    return found


def _own_functions(value: Any) -> Iterator[types.FunctionType]:
    inner = unwrap(value)
    if issubclass(type(inner), type):
        for found in vars(inner).values():
            yield from () if issubclass(type(unwrap(found)), type) else _own_functions(found)
        return
    while issubclass(type(inner), types.FunctionType):
        root = str(inner.__globals__.get("__name__", "")).partition(".")[0]
        if root not in _OTHERS:
            yield inner
            return
        inner = vars(inner).get("__wrapped__") if root == "torch" else None  # torch.compiler.disable, for instance
