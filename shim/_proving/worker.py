"""The process in which proofs run. It imports once what they need, and forks one process for each side of each proof.

Reads one JSON object from standard input, `Work.to_json`, in one line, and runs it after a second line, `GO`. Writes
one line of JSON for each side that has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shim._errors import OptionError
from shim._proving.reached import Spot, reached_in, watch
from shim._torch_names import find

__all__ = ["GO", "MODEL", "OVERRIDES", "UNUSABLE", "SideTask", "Work", "main", "run_side"]

MODEL = "model:"  # begins the source of a generic proof
OVERRIDES = "overrides"  # instead of a proof: shim's verdict on the model's overrides

GO = "go"
_POLL = 0.005  # seconds between two looks at the processes that run, if nothing tells when one ends

# What most proofs load beyond a GPT model. A release may lack a part.
_COMMON = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.models.mamba.mamba_layer_specs",
    "megatron.core.models.hybrid.hybrid_block",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "torch.utils.serialization.config",
    "torch.profiler",
    "multiprocessing.popen_fork",
)

UNUSABLE = "unusable"  # the state of an answer: the request makes no sense, and why


@dataclass(frozen=True)
class SideTask:
    """One side of a proof.

    source: the module of the patch, or "model:my_module:build" for a generic proof on that model.
    proof: its name. ids: the patches to apply; None applies nothing, an empty tuple all that shim.apply() would.
    options: of patches, by id, as shim.apply() takes them.
    trial: variants to apply whatever the bodies are, by id, as shim.apply_on_trial() takes them. left: so, too.
    watch: bodies of which the answer is to say under "reached" whether they ran.
    """

    key: str
    source: str
    proof: str
    ids: tuple[str, ...] | None
    device: str = "cpu"
    world: int = 1
    te: bool = False
    options: Mapping[str, Mapping[str, Any]] | None = None
    trial: Mapping[str, str] | None = None
    watch: tuple[Spot, ...] = ()
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """The tasks of one worker. preload: import megatron-core before the processes are forked."""

    tasks: tuple[SideTask, ...]
    preload: bool
    te: bool = False
    device: str = "cpu"
    jobs: int = 2
    timeout: float = 120.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        given = json.loads(text)
        tasks = tuple(_task_from(task) for task in given.pop("tasks"))
        return cls(tasks, **given)


def _task_from(given: dict[str, Any]) -> SideTask:
    ids, spots = given["ids"], tuple(tuple(spot) for spot in given["watch"])
    return SideTask(**{**given, "ids": None if ids is None else tuple(ids), "watch": spots})


def main() -> None:
    """Run the work that standard input describes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # upstream's output must not get between the answers
    with shared_by_forks():
        _import_torch()
        given = sys.stdin.readline()
        if not given:
            return  # no proof needs this process
        work = Work.from_json(given)
        if work.preload:
            _preload(work.te, work.device)
            _preload_own(work.tasks)
    if sys.stdin.readline().strip() == GO:
        _Pool(work, answers).run()


@contextlib.contextmanager
def shared_by_forks() -> Iterator[None]:
    """Import inside what forked processes share: none of them collects it as garbage.

    A collection writes to each object that it looks at, so each process would copy the memory of all modules, and those
    that it forks in turn. It takes as long as a small proof. Inside there is no garbage worth a search.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_torch() -> None:
    """Nobody patches torch, and no process may use a GPU before it is forked."""
    import torch

    torch.set_num_threads(1)


def _preload(te: bool, device: str) -> None:
    if te:
        import_te(device)
    elif device == "cpu":
        sys.meta_path.insert(0, _NoTransformerEngine())
    if find_spec("megatron") is not None:  # Transformer Engine may be there without it
        import megatron.core.models.gpt.gpt_model  # noqa: F401

        for name in _COMMON:
            with contextlib.suppress(Exception):
                import_module(name)
        find("torch._subclasses.schema_check_mode:__name__")  # for checkpoints

    import shim.testing.proof  # noqa: F401


def _preload_own(tasks: Sequence[SideTask]) -> None:
    """Load what is shim's: its engine and matrix, and the patches with their proofs. None of it changes megatron-core.

    An error is told by the side that has it.
    """
    import shim.testing

    with contextlib.suppress(Exception):
        shim.plan()  # it reads the matrix
    for name in shim.testing.__all__:
        with contextlib.suppress(Exception):
            getattr(shim.testing, name)
    for source in dict.fromkeys(task.source for task in tasks):
        with contextlib.suppress(Exception):
            shim.testing.proof.proofs_of(source)


def import_te(device: str) -> None:
    """Make Transformer Engine importable: as it is on a GPU, its Python layer alone on a CPU."""
    if device == "cpu":
        from shim.testing import transformer_engine_on_cpu

        transformer_engine_on_cpu()


class _NoTransformerEngine:
    """A finder of nothing. Without a GPU an installed Transformer Engine may raise anything when it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "transformer_engine":
            raise ModuleNotFoundError(f"{name} is left out of proofs that do not need it", name=name)


class _Pool:
    """At most `jobs` processes at once, each with a time limit, each the leader of a process group."""

    def __init__(self, work: Work, answers: Any) -> None:
        self._work = work
        self._answers = answers
        self._waiting = list(work.tasks)
        self._running: dict[int, tuple[SideTask, float, Path]] = {}

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="shim-prove-") as directory:
            try:
                while self._waiting or self._running:
                    while self._waiting and len(self._running) < self._work.jobs:
                        self._start(self._waiting.pop(0), Path(directory))
                    self._collect()
                    self._wait()
            finally:
                for pid in list(self._running):
                    self._kill(pid)

    def _start(self, task: SideTask, directory: Path) -> None:
        file = directory / f"{len(self._waiting)}.json"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _in_child(task, file, preloaded=self._work.preload)
        self._running[pid] = (task, time.monotonic(), file)

    def _wait(self) -> None:
        """Until a process ends, or has taken too long. Where the system cannot tell when one ends, for a moment."""
        oldest = min((started for _, started, _ in self._running.values()), default=0.0)
        left = max(oldest + self._work.timeout - time.monotonic(), 0.0)
        ends: list[int] = []
        try:
            for pid in self._running:
                ends.append(os.pidfd_open(pid))
            if ends:
                select.select(ends, [], [], left)
        except (AttributeError, OSError):  # it is no Linux, or one that forbids this
            time.sleep(_POLL)
        finally:
            for end in ends:
                os.close(end)

    def _collect(self) -> None:
        for pid, (task, started, file) in list(self._running.items()):
            seconds = time.monotonic() - started
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill_group(pid)  # ranks that outlived it
                del self._running[pid]
                self._answer(task, _result(file, os.waitstatus_to_exitcode(status), seconds))
            elif seconds > self._work.timeout:
                self._kill(pid)
                self._answer(task, {"state": "hung", "text": f"no end within {self._work.timeout:g} s"}, seconds)

    def _kill(self, pid: int) -> None:
        _kill_group(pid)
        os.kill(pid, signal.SIGKILL)  # which may not have made its group yet
        os.waitpid(pid, 0)
        del self._running[pid]

    def _answer(self, task: SideTask, result: dict[str, Any], seconds: float = 0.0) -> None:
        self._answers.write(json.dumps({"key": task.key, "seconds": seconds, **result}) + "\n")
        self._answers.flush()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _result(file: Path, code: int, seconds: float) -> dict[str, Any]:
    if file.exists():
        return json.loads(file.read_text("utf-8"))
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return {"state": "died", "text": f"the process ended with {how}", "seconds": seconds}


def _in_child(task: SideTask, file: Path, preloaded: bool) -> None:
    """Run the side and leave, without the exit handlers of the process that was forked."""
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        side = _watched(task, file.with_suffix(".reached"), preloaded) if task.watch else run_side(task, preloaded)
        written = file.with_suffix(".part")
        written.write_text(json.dumps(side), "utf-8")
        written.replace(file)
    finally:
        os._exit(0)


def _watched(task: SideTask, directory: Path, preloaded: bool) -> dict[str, Any]:
    directory.mkdir()
    watch(task.watch, directory)
    side = run_side(task, preloaded)
    return {**side, "reached": reached_in(directory)}


def run_side(task: SideTask, preloaded: bool = True) -> dict[str, Any]:
    """One side in this process: the fields of shim.testing.proof.Side as plain data."""
    try:
        import shim

        if task.te and not preloaded:
            import_te(task.device)
        if task.ids is not None:
            chosen: dict[str, Any] = {"only": list(task.ids), "require": list(task.ids)} if task.ids else {}
            if task.trial is None:
                shim.apply(**chosen, options=task.options)
            else:
                from shim._api import apply_on_trial

                apply_on_trial(task.trial, task.left, **chosen, options=task.options)
        elif task.source.startswith(MODEL):
            os.environ["MEGATRON_SHIM_DISABLE"] = "1"  # the user's module may apply shim itself
        if task.proof == OVERRIDES:
            from shim._proving.models import overrides_on

            return {"state": "right", "text": "", "overrides": overrides_on(_model(task), task.device)}
        from shim.testing.proof import Here, measure

        side = measure(_proof(task), Here(task.device, task.world, task.te))
        return {**asdict(side), "curves": {name: list(values) for name, values in side.curves.items()}}
    except OptionError as error:
        return {"state": UNUSABLE, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - any error must be reported
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"state": "broken", "text": text, "value": None, "details": traceback.format_exc()}


def _proof(task: SideTask) -> Any:
    if task.source.startswith(MODEL):
        from shim._proving.models import proofs_on

        found = proofs_on(_model(task))
    else:
        from shim.testing.proof import proofs_of

        found = proofs_of(task.source)
    return next(proof for proof in found if proof.name == task.proof)


def _model(task: SideTask) -> str:
    return task.source.removeprefix(MODEL)


if __name__ == "__main__":
    main()
