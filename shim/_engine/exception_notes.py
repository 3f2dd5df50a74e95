"""A note on an exception that nobody caught, if it passed through code of a patch: the patch, and how to run without.

The note is added where the traceback is about to be printed, by sys.excepthook and threading.excepthook, which read the
frames that the exception has passed through. Functions of patches cannot add it themselves: a `try` around their code
costs two of four graphs of torch.compile if there is a graph break below, and a function around them costs as much per
call as they do. So an exception that somebody catches has no note.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shim._engine.log import logger
from shim._errors import ShimError

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["ExceptionNotes", "note_for"]

SAID = "shim: this exception passed through "
PACKAGE_FILE = "__init__.py"
MOST = 8  # patches in a note
HOOKS = ((sys, "excepthook"), (threading, "excepthook"))


class ExceptionNotes:
    """The two hooks of Python, while a plan is in force. plan: gives the plan in force, or None."""

    def __init__(self, plan: Callable[[], Plan | None]) -> None:
        self._plan = plan
        # Each hook before, and shim's in its place.
        self._before: dict[str, Any] = {}
        self._ours = {"sys": self._main, "threading": self._thread}

    def follow(self, wanted: bool) -> None:
        """Install the hooks, or take them out. One that other hooks call stays, and adds no note without a plan."""
        for module, name in HOOKS:
            ours, now = self._ours[module.__name__], getattr(module, name)
            if not wanted and now is ours:
                setattr(module, name, self._before.pop(module.__name__))
            elif wanted and module.__name__ not in self._before:
                self._before[module.__name__] = now  # first: an interrupt must not lose it
                setattr(module, name, ours)

    def _main(self, kind: Any, error: Any, traceback: Any) -> Any:
        self._add(error)
        return self._before.get("sys", sys.__excepthook__)(kind, error, traceback)

    def _thread(self, arguments: Any) -> Any:
        self._add(arguments.exc_value)
        return self._before.get("threading", threading.__excepthook__)(arguments)

    def _add(self, error: Any) -> None:
        """Never raises: the traceback has to be printed."""
        try:
            plan = self._plan()
            text = "" if plan is None else note_for(error, plan)
            if text and hasattr(error, "add_note"):
                error.add_note(text)
            elif text:  # Python 3.10
                logger().error("%s", text)
        except Exception:  # noqa: BLE001 - of an exception whose class computes its attributes, for instance
            return


def note_for(error: Any, plan: Plan) -> str:
    """The note for an exception; "" if it needs none.

    An interrupt and the like need none, nor does an error of shim's, which names the patch itself.
    """
    if not isinstance(error, Exception) or isinstance(error, ShimError):
        return ""
    if any(isinstance(note, str) and note.startswith(SAID) for note in getattr(error, "__notes__", ())):
        return ""
    places = {place: id for id, decision in plan.decisions.items() if decision.wanted for place in _places(plan, id)}
    ids = list(dict.fromkeys(id for file in _files_of(error) if (id := _patch_of(file, places))))
    if not ids:
        return ""
    shown = ", ".join(ids[:MOST]) + (f" and {len(ids) - MOST} more" if len(ids) > MOST else "")
    several = len(ids) > 1
    return (
        f"{SAID}code of {'patches' if several else 'the patch'} {shown}, and need not come from there. To run without "
        f"{'them' if several else 'it'}: MEGATRON_SHIM_EXCLUDE={','.join(ids)}. To report it, add the output of "
        "`shim doctor`."
    )


def _places(plan: Plan, id: str) -> Iterator[str]:
    """The file of a patch module that is loaded, or its folder."""
    file = getattr(sys.modules.get(plan.matrix.patches[id].module), "__file__", None)
    if isinstance(file, str):
        yield os.path.dirname(file) if os.path.basename(file) == PACKAGE_FILE else file


def _patch_of(file: str, places: Mapping[str, str]) -> str | None:
    return places.get(file) or places.get(os.path.dirname(file))


def _files_of(error: BaseException) -> Iterator[str]:
    """The files of the frames that an exception has passed through, the innermost first, and those of its causes."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        files, traceback = [], found.__traceback__
        while isinstance(traceback, types.TracebackType):
            files.append(traceback.tb_frame.f_code.co_filename)
            traceback = traceback.tb_next
        yield from reversed(files)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
