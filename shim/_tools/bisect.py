"""`shim bisect`: which patch, or which few together, change what a command does."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from shim._api import plan
from shim._errors import NotMetError, OptionError
from shim._planning.plan import Plan
from shim._tools.arguments import selection
from shim._tools.bisect_runs import Outcome, Record, differs, execute, same_number
from shim._tools.bisect_search import Found, search
from shim._tools.output import OK, put, tell
from shim._workers.environment import refuse_to_be_ignored, run_environment

__all__ = ["do_bisect"]

INTERRUPTED, TERMINATED = 130, 143
ALL, NONE, AGAIN = "all", "none", "all again"
STATE = "state.json"
WORDS = {True: "differs from the run without patches", False: "as without patches", None: "tells nothing"}


def do_bisect(arguments: argparse.Namespace) -> int:
    command = arguments.command_line[1:] if arguments.command_line[:1] == ["--"] else arguments.command_line
    _refuse(arguments, command)
    made = plan(**selection(arguments), lock=None)
    bisection = Bisection(arguments, command, made)
    try:
        with _terminable():
            found = bisection.find()
    except KeyboardInterrupt as stop:
        done = len(bisection.record.outcomes)
        tell(
            f"shim: bisect stopped in run {done + 1}. {done} run{'' if done == 1 else 's'} of {arguments.dir} count: "
            "the same command goes on behind them."
        )
        return TERMINATED if stop.args else INTERRUPTED
    put(bisection.to_dict(found), bisection.text(found), arguments.json)
    return OK


def _refuse(arguments: argparse.Namespace, command: Sequence[str]) -> None:
    """Errors for what cannot work, before anything runs."""
    if not command:
        raise OptionError("shim bisect needs a command behind --, for instance: shim bisect -- torchrun train.py")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise OptionError("torchrun has started shim bisect; put it in front instead: shim bisect -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise OptionError(f"{command[0]} cannot be run: there is no such command")
    refuse_to_be_ignored(command)
    if not 0 <= arguments.tolerance < float("inf"):
        raise OptionError(f"--tolerance is {arguments.tolerance}; it must be 0 or more")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as schedulers send it, ends the run at hand as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Bisection:
    """One search: the runs it needs, and what it says."""

    def __init__(self, arguments: argparse.Namespace, command: Sequence[str], made: Plan) -> None:
        if made.options.disabled:
            raise OptionError("MEGATRON_SHIM_DISABLE is set, so no patch can change anything; unset it")
        self.matrix = made.matrix
        self.patches = tuple(id for id, decision in made.decisions.items() if decision.wanted)
        if not self.patches:
            raise NotMetError("no patch applies here, so none can change the command. shim plan says why.")
        self.command, self.tolerance, self.timeout = command, arguments.tolerance, arguments.timeout
        try:
            self.metric = None if arguments.metric is None else re.compile(arguments.metric)
        except re.error as error:
            raise OptionError(f"--metric {arguments.metric!r} is not a regular expression: {error}") from None
        if self.metric is not None and self.metric.groups > 1:
            raise OptionError(f"--metric {arguments.metric!r} has several groups; mark the number with one")
        self.given = {**selection(arguments), "lock": None}
        about = {
            "command": list(command),
            "directory": os.getcwd(),
            "patches and options": run_environment({}, **self._keeping(self.patches)),
            "patches": list(self.patches),
            "installed packages or shim": made.digest,
            "metric": arguments.metric,
            "timeout": self.timeout,
        }
        self.directory = Path(arguments.dir)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--dir {arguments.dir} cannot be written: {error}") from None
        self.record = Record(self.directory / STATE, about, arguments.anew)
        if known := len(self.record.outcomes):
            tell(f"{known} run{'' if known == 1 else 's'} are known from {self.record.path}; --refresh forgets them")

    def find(self) -> Found:
        """NotMetError if there is nothing to find, or nothing that can be found."""
        every = frozenset(self.patches)
        whole = self._run(every, "then a run with none, which must differ")
        stock = self._run(frozenset(), "")
        self._compare(stock, whole)
        again = self._run(every, "once more, which must give the same", AGAIN)
        if again.exit != whole.exit or not same_number(whole.number, again.number, self.tolerance):
            raise NotMetError(
                f"the command is not repeatable: with all patches it gave {whole}, and then {again}. Remedy: fix its "
                "seeds and the order of its data, or call numbers the same that differ by less: --tolerance"
            )
        searching = search(self.patches)
        try:
            step = next(searching)
            while True:
                many = "" if step.together else " if one does it alone"
                run = self._run(step.kept, f"{step.why}; at most {step.left} left{many}")
                told = differs(run, stock, whole, self.tolerance)
                tell(f"  {WORDS[told]}")
                step = searching.send(bool(told))
        except StopIteration as end:
            found: Found = end.value
            return found

    def _name(self, kept: frozenset[str]) -> str:
        return {len(self.patches): ALL, 0: NONE}.get(len(kept)) or ",".join(sorted(kept))

    def _run(self, kept: frozenset[str], why: str, name: str = "") -> Outcome:
        name = name or self._name(kept)
        known = self.record.outcomes.get(name)
        if known is not None:
            return known
        number = len(self.record.outcomes) + 1
        log = self.directory / f"run-{number:02}.log"
        what = {len(self.patches): f"all {len(self.patches)} patches", 0: "no patches"}
        said = what.get(len(kept), f"{len(kept)} of {len(self.patches)} patches")
        tell(f"run {number}: {said}{f', {why}' if why else ''}")
        outcome = execute(self.command, run_environment(**self._keeping(kept)), log, self.metric, self.timeout)
        self.record.add(name, outcome)
        tell(f"  {outcome} after {outcome.seconds:g} s, output in {log}")
        return outcome

    def _keeping(self, kept: Sequence[str] | frozenset[str]) -> dict[str, Any]:
        """Arguments of run_environment. Only `exclude` outranks the arguments of a trainer's own apply()."""
        left_out = [id for id in self.patches if id not in kept]
        return {**self.given, "exclude": [*self.given.get("exclude", ()), *left_out]}

    def _compare(self, stock: Outcome, whole: Outcome) -> None:
        """NotMetError if the runs with all patches and with none do not differ, or cannot be compared."""
        if stock.exit != whole.exit or not same_number(stock.number, whole.number, self.tolerance):
            return
        if self.metric is None:
            why = " To compare a number that it prints, add --metric."
        elif stock.number is None:
            raise NotMetError(
                f"No number stands where --metric {self.metric.pattern!r} looks for one, so the runs cannot be told "
                f"apart: with all {len(self.patches)} patches the command gave {whole}. Look into {whole.log}."
            )
        else:
            why = ""
        raise NotMetError(
            f"patches change nothing here: with all {len(self.patches)} of them the command gave {whole}, and with "
            f"none {stock}.{why} If shim reaches its processes, {self.directory / whole.log} has a line of shim's."
        )

    # The result

    def to_dict(self, found: Found) -> dict[str, Any]:
        runs = self.record.outcomes
        return {
            "patches": list(found.patches),
            "rest_changes": found.rest_changes,
            "command": list(self.command),
            "runs": {
                name: {"exit": run.exit, "number": run.number, "seconds": run.seconds, "log": run.log}
                for name, run in runs.items()
            },
        }

    def text(self, found: Found) -> str:
        runs, several = self.record.outcomes, len(found.patches) > 1
        what = "change the result, only together" if several else "changes the result"
        lines = [f"{' and '.join(found.patches)} {what} (found in {len(runs)} runs):"]
        for what, kept in (
            ("without patches", frozenset()),
            (f"with {'these' if several else 'it'} alone", frozenset(found.patches)),
            (f"with all but {'these' if several else 'it'}", frozenset(self.patches) - frozenset(found.patches)),
            ("with all patches", frozenset(self.patches)),
        ):
            if (run := runs.get(self._name(kept))) is not None:
                lines.append(f"  {what:<20}{run}")
        for id in found.patches:
            entry = self.matrix.patches[id]
            lines += ["", f"{id} ({entry.kind}, changes {entry.changes}): {entry.summary}"]
        lines += ["", f"To leave {'them' if several else 'it'} out:  MEGATRON_SHIM_EXCLUDE={','.join(found.patches)}"]
        lines += [f"To read more:  shim explain {id}" for id in found.patches]
        if found.rest_changes:
            more = ",".join([*self.given.get("exclude", ()), *found.patches])
            lines += ["", "The other patches change the result as well. To find the next one, add"]
            lines += [f"  --exclude {more} --dir {self.directory}-next"]
        return "\n".join(lines)
