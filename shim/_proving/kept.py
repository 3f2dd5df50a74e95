"""The answers of a run of proofs that was interrupted, so that the next one goes on where it ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shim._proving.worker import SideTask

__all__ = ["Kept"]


class Kept:
    """Answers of workers by task, in a file with a line for each.

    about: whatever else an answer depends on: the tree, the code of shim, torch. An answer of another is not used.
    """

    def __init__(self, file: Path, about: Mapping[str, Any]) -> None:
        self._file = file
        self._about = _digest(about)
        self._answers: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError):
            for line in file.read_text("utf-8", "replace").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn line is measured again
                    told = json.loads(line)
                    if told["about"] == self._about:
                        self._answers[told["task"]] = told["answer"]

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, task: SideTask) -> dict[str, Any] | None:
        return self._answers.get(self._key(task))

    def keep(self, task: SideTask, answer: dict[str, Any]) -> None:
        """Write the answer down, unless it may be another next time: a process that died or did not end in time."""
        if answer["state"] in ("hung", "died", "ended"):
            return
        key = self._key(task)
        self._answers[key] = answer
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"about": self._about, "task": key, "answer": answer}) + "\n")

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)

    def _key(self, task: SideTask) -> str:
        return _digest({**asdict(task), "key": ""})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
