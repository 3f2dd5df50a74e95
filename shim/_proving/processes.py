"""Worker processes as the command sees them: started early, given their work, and ended with all that they forked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from shim._planning.options import PREFIX
from shim._proving.worker import GO, Work

__all__ = ["ENDED", "Process"]

ENDED = "ended"  # the state of an answer: the process has ended before it gave one

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from shim._proving.worker import main; main()"
_IMPORTS = 300.0  # seconds that a worker may take for imports, in addition to the time limit of a side


class Process:
    """A worker process. It imports torch at once, what the proofs need when it is given them, and runs them on demand.

    So imports go on while this process does something else: reads the proofs, or waits for another worker.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._work: Work | None = None
        self._running = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([entry or os.getcwd() for entry in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=_environment(device),
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        self._said.close()

    def give(self, work: Work) -> None:
        """Let it import what this work needs. No side of it is run yet."""
        self._work = work
        self._write(work.to_json())

    def answers(self) -> Iterator[dict[str, Any]]:
        """Run the work: one answer for each task, also if the process dies."""
        assert self._work is not None and self._process.stdout is not None
        left = {task.key for task in self._work.tasks}
        self._running = True
        self._write(GO)
        for line in _lines(self._process.stdout.fileno(), self._work.timeout + _IMPORTS):
            answer = json.loads(line)
            left.discard(answer["key"])
            yield answer
        self._end()
        for key in left:
            text = f"the process that imports megatron-core ended: {self._last_words()}"
            yield {"key": key, "state": ENDED, "text": text}

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines() or ["without a word"]
        # Libraries print more while the process ends.
        return next(
            (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)), lines[-1]
        )

    def _end(self) -> None:
        """Let it end, and with it the processes that it has forked: on an interrupt it kills them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._running:
            self._process.kill()  # it has forked nothing yet
        for patience, number in ((1, None), (10, signal.SIGINT), (None, signal.SIGKILL)):
            if number is not None:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        self._process.stdout.close()


def _lines(descriptor: int, patience: float) -> Iterator[bytes]:
    """Lines until the end of the file, or until none comes for `patience` seconds."""
    rest = b""
    while select.select([descriptor], [], [], patience)[0]:
        part = os.read(descriptor, 65536)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def _environment(device: str) -> dict[str, str]:
    """This process's, without what would apply shim on stock, or give a CPU proof a GPU.

    `shim run` does its work by PYTHONPATH. The worker is given sys.path instead.
    """
    ours = {name for name in os.environ if name.startswith(PREFIX) and name != f"{PREFIX}MATRIX"}
    kept = {name: value for name, value in os.environ.items() if name not in {*ours, "PYTHONPATH"}}
    if device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
        # What megatron-core compiles runs as it is written: compiling takes longer than a proof, as does its import.
        kept.setdefault("TORCHDYNAMO_DISABLE", "1")
        # 0.15 compiles for CUDA at its import. With nvcc and no GPU, torch knows no architecture for it and raises.
        kept.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept.setdefault("NO_VCS_VERSION", "1")  # else megatron-core runs git at its import
    return kept
