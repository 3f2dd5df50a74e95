"""What shim says: messages that wait until the engine's lock is free, one line for each job, notes on exceptions.

A logging handler may wait for another thread while that thread waits for the engine. So messages are queued here while
the engine's lock is held, and while importlib asks finders for a module. The queue needs no lock: a deque appends and
pops atomically, and `logged` changes under the engine's lock only.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shim._errors import ShimError
from shim._planning.options import SAID
from shim._printing.printable import one_line
from shim._version import __version__

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = [
    "DeferredLog",
    "ExceptionNotes",
    "announce",
    "distributed_if_ready",
    "is_below_run",
    "is_first_of_job",
    "is_rank_zero",
    "logger",
    "note_for",
    "say",
]


_LOGGED_LIMIT = 1000
_LIMIT = 8000  # characters of a message. Names of all patches take a third of it.
_LINE = 160  # characters of a warning on ranks other than 0


def logger() -> logging.Logger:
    """The logger of shim."""
    return logging.getLogger("shim")


def distributed_if_ready() -> Any:
    """torch.distributed if it is imported and initialised, else None. Imports nothing."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def distributed_rank() -> int | None:
    """The rank in torch.distributed, or None if it is not initialised."""
    distributed = distributed_if_ready()
    return None if distributed is None else int(distributed.get_rank())


def is_rank_zero() -> bool:
    """Whether this process logs for all ranks: rank 0, or a process without ranks."""
    rank = distributed_rank()
    return rank == 0 if rank is not None else os.environ.get("RANK", "0") == "0"


def short_of(text: str) -> str:
    """The text, whole on rank 0 and as one short line on other ranks, which mostly say the same."""
    return text if is_rank_zero() else text[:_LINE]


class DeferredLog:
    """The queue, and the warnings queued so far.

    within: whether this thread holds the engine's lock.
    """

    def __init__(self, within: Callable[[], bool]) -> None:
        self.logged: set[str] = set()
        self._within = within
        self._waiting: deque[tuple[int, str]] = deque()

    def warn(self, text: str) -> None:
        self._waiting.append((logging.WARNING, text))

    def warn_once(self, texts: Iterable[str]) -> None:
        """Queue each text once in the process."""
        for text in texts:
            self._once(text, text)

    def warn_patch(self, patch: str, state: str, reason: str, text: str) -> None:
        """Queue a warning about a patch once in the process. Ranks other than 0 get one short line of it.

        apply() and check() find the same things, and so do mostly all ranks.
        """
        said = text if is_rank_zero() else short_of(f"{patch} ({state}): {reason}")
        self._once(f"{patch} {state} {reason}", said)

    def _once(self, about: str, text: str) -> None:
        if about not in self.logged and len(self.logged) < _LOGGED_LIMIT:
            self.warn(text)  # first: who is interrupted here says it twice, rather than never
            self.logged.add(about)

    def flush(self) -> None:
        """Log the queued messages. Called without the lock, and not while importlib asks finders for a module."""
        for _ in range(len(self._waiting)):
            try:
                level, text = self._waiting.popleft()
            except IndexError:
                return
            log, line = logger(), one_line(text, _LIMIT)
            log.log(level, "%s", line if log.hasHandlers() or not is_below_run() else _wrapped(line))

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Queue everything this thread logs in the block: factories of patches log under the lock unawares."""
        logger().addFilter(self)
        try:
            yield
        finally:
            logger().removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the logger is to log a record now, as logging asks."""
        within = self._within()
        if within:
            self._waiting.append((record.levelno, record.getMessage()))
        return not within


# One line for each job: shim's version, how many patches, the releases, and how to do without


# Of launchers; the first that is set counts. torchrun sets RANK, also below srun and mpirun.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
RUN = "/_workers/run"  # the end of the directory that `shim run` puts on PYTHONPATH


def announce(plan: Plan) -> bool:
    """Log the line at level INFO in the first process of a job, and return whether it has been said.

    Below `shim run` it goes to standard error while no logging is configured. Nothing is computed if nobody reads it.
    """
    if not is_first_of_job():
        return False
    below_run = is_below_run()
    if not say(lambda: line_for(plan), below_run):
        return False
    if below_run:
        os.environ[SAID] = "1"
    return True


def say(line: Callable[[], str], below_run: bool) -> bool:
    """Log a line, or print it in lines of COLUMNS or 80, and return whether somebody reads it."""
    log = logger()
    if log.isEnabledFor(20) and log.hasHandlers():  # INFO
        log.info("%s", line())
    elif below_run and not log.hasHandlers() and sys.stderr is not None:
        try:
            print(_wrapped(line()), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # closed, or nobody reads it
            return False
    else:
        return False
    return True


def _wrapped(line: str) -> str:
    """The line as lines of COLUMNS or 80, for a person in front of a terminal."""
    import textwrap  # here, because most jobs log

    given = os.environ.get("COLUMNS", "")
    width = int(given) if given.isdigit() else 80
    return "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False))


def line_for(plan: Plan) -> str:
    # Without the digest, which reads all files of shim: a third of an apply().
    if plan.options.disabled:
        return f"shim {__version__} is off, because MEGATRON_SHIM_DISABLE is set"
    number = sum(decision.wanted for decision in plan.decisions.values())
    releases = ", ".join(found.release for found in plan.environment.installed.values())
    return (
        f"shim {__version__} applies {number} patch{'' if number == 1 else 'es'} to {releases or 'nothing installed'}; "
        "without it: MEGATRON_SHIM_DISABLE=1, without a patch: MEGATRON_SHIM_EXCLUDE=ID"
    )


def is_first_of_job() -> bool:
    """Whether this process speaks for its job: rank 0, or, if it has no rank, no worker of Ray or multiprocessing."""
    if os.environ.get(SAID):
        return False
    rank = distributed_rank()
    if rank is not None:
        return rank == 0
    if _is_started_by_another():  # it has inherited the rank
        return False
    told = next((os.environ[name] for name in RANKS if os.environ.get(name)), None)
    return told == "0" if told is not None else "RAY_RAYLET_PID" not in os.environ


def _is_started_by_another() -> bool:
    """Whether multiprocessing has started this process. Imports nothing."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # A spawned process imports the program's modules before it knows its parent.
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def is_below_run() -> bool:
    """Whether `shim run` has started this process, or one above it."""
    return any(entry.replace(os.sep, "/").endswith(RUN) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep))


# A note on an exception that nobody caught, if it passed through code of a patch: the patch, and how to run without
#
# The note is added where the traceback is about to be printed, by sys.excepthook and threading.excepthook, which read
# the frames that the exception has passed through. Functions of patches cannot add it themselves: a `try` around their
# code costs two of four graphs of torch.compile if there is a graph break below, and a function around them costs as
# much per call as they do. So an exception that somebody catches has no note.


NOTED = "shim: this exception passed through "
PACKAGE_FILE = "__init__.py"
MOST = 8  # patches in a note
HOOKS = ((sys, "excepthook"), (threading, "excepthook"))


class ExceptionNotes:
    """The two hooks of Python, while a plan is in force. plan: gives the plan in force, or None."""

    def __init__(self, plan: Callable[[], Plan | None]) -> None:
        self._plan = plan
        self._before: dict[str, Any] = {}  # what each hook was before

    def follow(self, wanted: bool) -> None:
        """Install the hooks, or take them out. One that other hooks call stays, and adds no note without a plan."""
        for (module, name), ours in zip(HOOKS, (self._main, self._thread)):
            now = getattr(module, name)
            if not wanted and now == ours:
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
    if any(isinstance(note, str) and note.startswith(NOTED) for note in getattr(error, "__notes__", ())):
        return ""
    places = {place: id for id, decision in plan.decisions.items() if decision.wanted for place in _places(plan, id)}
    ids = list(dict.fromkeys(id for file in _files_of(error) if (id := _patch_of(file, places))))
    if not ids:
        return ""
    shown = ", ".join(ids[:MOST]) + (f" and {len(ids) - MOST} more" if len(ids) > MOST else "")
    several = len(ids) > 1
    return (
        f"{NOTED}code of {'patches' if several else 'the patch'} {shown}, and need not come from there. To run without "
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
