"""A pool of gloo ranks, forked from a process that has already imported its modules."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shim._torch_names import find

from .forks import forking, free_groups
from .patience import patience

__all__ = ["RankError", "Ranks"]

COMPILING_THREADS = "torch._inductor.async_compile:AsyncCompile.pool"
_GRACE = 0.5  # seconds for the other ranks to answer once one of them has failed
_GRACE_OF_CAUSE = 10.0  # the same while each of those that have failed says that it has lost a peer: the peer knows why
_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Socket closed")


class RankError(RuntimeError):
    """A rank failed, died or did not answer.

    rank: the first such rank that did not only lose a peer. remote_traceback: its traceback or stack. exception_type:
    the type name of its exception, "" if it died or hung. others: the errors of the other ranks that failed with it,
    each without `others`.
    """

    def __init__(self, rank: int, what: str, remote_traceback: str, exception_type: str = "") -> None:
        super().__init__(f"rank {rank} {what}\n{remote_traceback}".rstrip())
        self.rank = rank
        self.others: tuple[RankError, ...] = ()
        self.remote_traceback = remote_traceback
        self.exception_type = exception_type


class Ranks:
    """`world` persistent processes in one gloo group that run functions together.

        with Ranks(2) as ranks:
            losses = ranks.run(step, "rope")   # step("rope") in both; results by rank

    The first `run` forks the processes, with all modules imported so far. They live until `close`. Functions and
    arguments are pickled, so a function must be at the top level of an importable module. Rendezvous is a file in a
    private directory, so pools need no ports and any number can run at once. In each process RANK, WORLD_SIZE and
    LOCAL_RANK are set, torch has one thread, and torch.distributed is initialised.

    After an error all ranks are killed, because the others may hang in a collective. The next `run` forks new ones.
    The forking process must not have used CUDA. Its process group of world 1, if any, is destroyed first.
    """

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"a world of {world} ranks")
        self.world = world
        self._closed = False
        self._directory: Path | None = None
        self._connections: list[multiprocessing.connection.Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks. The pool cannot be used again."""
        self._closed = True
        self._kill()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call fn(*args) in every rank at once and return the results by rank.

        Raises RankError, with the rank's traceback, if a rank raises, dies, or does not answer within `timeout`
        seconds (by default ten minutes, more on a machine with much else to do). Raises RuntimeError if the pool is
        closed.
        """
        timeout = patience() if timeout is None else timeout
        if self._closed:
            raise RuntimeError("this pool of ranks is closed")
        request = pickle.dumps((fn, args))
        try:
            if not self._processes:
                self._fork()
            for rank, connection in enumerate(self._connections):
                with self._death_of(rank):
                    connection.send_bytes(request)
            return self._collect(time.monotonic() + timeout, timeout)
        except BaseException:
            self._kill()
            raise

    def _collect(self, deadline: float, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[RankError] = []
        waiting = dict(zip(self._connections, range(self.world), strict=True))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in [known for known in waiting if known in ready]:
                rank = waiting.pop(connection)
                try:
                    with self._death_of(rank):
                        kind, payload = pickle.loads(connection.recv_bytes())
                except RankError as error:
                    kind, payload = "failed", error
                if kind == "returned":
                    results[rank] = payload
                elif kind == "raised":
                    exception_type, text = payload
                    failures.append(RankError(rank, f"raised {exception_type}", text, exception_type))
                else:
                    failures.append(payload)
            if failures:
                grace = _GRACE_OF_CAUSE if all(map(_lost_peer, failures)) else _GRACE
                deadline = min(deadline, time.monotonic() + grace)
        if failures:
            raise _root_cause(failures)
        if waiting:
            hung = sorted(waiting.values())
            what = f"did not answer within {timeout:g} s (ranks {hung} of {self.world} were still busy)"
            raise RankError(hung[0], what, self._where(hung[0]))
        return [results[rank] for rank in range(self.world)]

    @contextlib.contextmanager
    def _death_of(self, rank: int) -> Iterator[None]:
        """Turn a broken pipe to a rank into a RankError."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self._processes[rank].join(1)
            code = self._processes[rank].exitcode
            raise RankError(rank, f"died with exit code {code}", "") from error

    def _where(self, rank: int) -> str:
        """The stack of a rank that does not answer. The rank writes it on a signal."""
        assert self._directory is not None
        file = self._directory / f"stack.{rank}"
        os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return file.read_text() if file.exists() else ""

    def _fork(self) -> None:
        _leave_single_world()
        self._directory = Path(tempfile.mkdtemp(prefix="shim-ranks-"))
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(self.world)]
        self._connections = [ours for ours, _ in pipes]
        # Else every process would write the buffered output again.
        sys.stdout.flush()
        sys.stderr.flush()
        with forking() as collect_what_comes, warnings.catch_warnings():
            # Python 3.12 warns about threads at a fork. torch's threads hold no lock between two calls.
            warnings.simplefilter("ignore", DeprecationWarning)
            for rank in range(self.world):
                given = (rank, pipes, self._directory, collect_what_comes)
                process = context.Process(target=_serve, args=given, name=f"rank {rank}", daemon=True)
                process.start()
                self._processes.append(process)
        for _, theirs in pipes:
            theirs.close()

    def _kill(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._connections, self._processes = [], []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _lost_peer(failure: RankError) -> bool:
    """Whether a rank failed by the loss of a peer in a collective, and not on its own."""
    return _LOST_PEER.search(failure.remote_traceback) is not None


def _root_cause(failures: list[RankError]) -> RankError:
    """The first rank that failed on its own, if any, with the errors of the others."""
    cause = next((failure for failure in failures if not _lost_peer(failure)), failures[0])
    cause.others = tuple(failure for failure in failures if failure is not cause)
    return cause


def _leave_single_world() -> None:
    """A forked rank cannot use its parent's process group. Destroy a group of world 1; refuse any other."""
    if not dist.is_initialized():
        return
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    busy = parallel_state is not None and parallel_state.model_parallel_is_initialized()
    if busy or dist.get_world_size() > 1:
        raise RuntimeError("ranks cannot be forked while torch.distributed is in use in this process")
    free_groups([dist.group.WORLD])


def _serve(rank: int, pipes: list[Any], directory: Path, collect_what_comes: Callable[[], None]) -> None:
    """Main loop of a rank. Ends when the parent closes its end of the pipe or is gone."""
    connection = pipes[rank][1]
    for other, (parents, ranks) in enumerate(pipes):
        # A rank notices the parent's death only if no rank holds a copy of the parent's ends.
        parents.close()
        if other != rank:
            ranks.close()
    world = len(pipes)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # Otherwise gloo looks up the host's name, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # A process group inherited from the parent has no threads here, and its destructor would wait for them forever.
    # So no inherited object may be freed, neither as garbage nor when megatron's globals get new values.
    collect_what_comes()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    _kept_alive = [] if parallel_state is None else list(vars(parallel_state).values())
    threads = find(COMPILING_THREADS) if COMPILING_THREADS.partition(":")[0] in sys.modules else None
    if threads is not None:
        # torch forgets compiling processes at a fork, but not compiling threads, and would wait for those forever.
        threads.cache_clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills the ranks
    with open(directory / f"stack.{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        joined = False
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                shutil.rmtree(directory, ignore_errors=True)  # a killed parent could not remove it
                os._exit(0)  # skips all destructors, for the same reason
            try:
                if not joined:
                    store = dist.FileStore(str(directory / "rendezvous"), world)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
                    joined = True
                fn, args = pickle.loads(request)
                # Plain pickle copies tensors; multiprocessing's pickler would pass shared memory.
                answer = pickle.dumps(("returned", fn(*args)))
            # Also SystemExit and pytest.skip, so that no rank ends silently.
            except BaseException as error:  # noqa: BLE001
                answer = pickle.dumps(("raised", (type(error).__name__, traceback.format_exc())))
            connection.send_bytes(answer)
