"""The runs of `shim bisect`: a command with some of the patches, what came out, and the file that remembers it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shim._errors import NotMetError, OptionError
from shim._planning.lock import HELD
from shim._releases.files import read_json

__all__ = ["Outcome", "Record", "differs", "execute", "number_in", "same_number"]

FORMAT = 1
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"


@dataclass(frozen=True)
class Outcome:
    """What came out of one run. exit: as a shell has it, or None after `--timeout`. number: of `--metric`, if found."""

    exit: int | None
    number: float | None
    seconds: float
    log: str

    def __str__(self) -> str:
        ended = "did not end in time" if self.exit is None else f"exit {self.exit}"
        return ended if self.number is None else f"{ended}, {self.number!r}"


def same_number(one: float | None, other: float | None, tolerance: float) -> bool:
    """Whether two numbers differ by no more than `tolerance`, relative to the larger. Two NaN are the same."""
    if one is None or other is None:
        return one is other
    if one == other or (one != one and other != other):
        return True
    return abs(one - other) <= tolerance * max(abs(one), abs(other)) < float("inf")


def differs(run: Outcome, stock: Outcome, whole: Outcome, tolerance: float) -> bool | None:
    """Whether `run` differs from `stock`, the run without patches, as `whole`, that with all of them, does.

    None if it tells nothing: it ended in a third way, or printed no number.
    """
    if stock.exit != whole.exit:
        return run.exit == whole.exit if run.exit in (stock.exit, whole.exit) else None
    if run.exit != whole.exit or (run.number is None and None not in (stock.number, whole.number)):
        return None
    return not same_number(run.number, stock.number, tolerance)


def number_in(log: Path, metric: re.Pattern[str] | None) -> float | None:
    """The number of the last match in a file: the first group of the expression, or what follows the match in its line.

    None without an expression, a match, or a number there.
    """
    found = None
    if metric is not None:
        with open(log, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                for match in metric.finditer(line):
                    text = match[1] if metric.groups else line[match.end() :]
                    number = re.search(NUMBER, text or "", re.IGNORECASE)
                    found = found if number is None else float(number[0])
    return found


def execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    metric: re.Pattern[str] | None,
    timeout: float | None,
) -> Outcome:
    """Run `command` to its end, with its output in the file `log`. What it leaves running is ended as well.

    timeout: seconds after which it is ended.    NotMetError for a command that holds itself to a lock.
    """
    began = time.monotonic()
    # An interrupt while the process starts would leave it behind, because nothing holds it yet.
    held_back = _HeldBack()
    try:
        with open(log, "wb") as output:
            # In a group of its own, so that a launcher ends with all of its workers.
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except BaseException:
        held_back.end()
        raise
    with _ended(process):
        held_back.end()
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
    if code is not None and code < 0:
        code = 128 - code  # as a shell has it
    if code and HELD.encode() in log.read_bytes():
        raise NotMetError(f"the command holds itself to a lock, so no patch can be left out ({log}). Remedy: drop it.")
    return Outcome(code, number_in(log, metric), round(time.monotonic() - began, 1), log.name)


class _HeldBack:
    """Holds SIGINT and SIGTERM back, in the main thread, from now until `end`, which lets the handlers have them."""

    def __init__(self) -> None:
        self._got: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, lambda number, frame: self._got.append(number))

    def end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number in self._got:
            signal.raise_signal(number)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the group of `process`, however the block ends: a run that goes on would disturb the next."""
    try:
        yield
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            process.wait(GRACE)
    except KeyboardInterrupt:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        raise
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(process.pid, number)


class Record:
    """The file with the outcomes of all runs so far. It is written after each run, whole or not at all.

    about: what the runs depend on. OptionError if the file is of something else, or no such file.
    anew: forget what the file holds.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], anew: bool) -> None:
        self.path = path
        self._about = json.loads(json.dumps(about))
        self.outcomes: dict[str, Outcome] = {}
        if not anew:
            self._read()

    def _read(self) -> None:
        remedy = "Remedy: name another directory by --dir, or start over with --refresh."
        try:
            found = read_json(self.path.read_bytes())
            runs = {name: Outcome(**{**run, "number": _number(run["number"])}) for name, run in found["runs"].items()}
            theirs = dict(found["about"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"{self.path} cannot be read: {type(error).__name__}: {error}. {remedy}") from None
        other = [name for name in self._about if theirs.get(name) != self._about[name]]
        if other or found.get("format") != FORMAT:
            what = ", ".join(other) or "format"
            raise OptionError(f"{self.path} is of another search, which differs in: {what}. {remedy}")
        self.outcomes = runs

    def add(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        # A number as text, because JSON has no NaN.
        runs = {
            of: {**vars(run), "number": None if run.number is None else repr(run.number)}
            for of, run in self.outcomes.items()
        }
        text = {"format": FORMAT, "about": self._about, "runs": runs}
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(text, indent=2) + "\n", "utf-8")
        os.replace(scratch, self.path)


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)
