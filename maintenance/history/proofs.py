"""The proofs of some patches on one commit: its sources in a directory for as long as they run."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._archives.trees import open_tree
from shim._errors import OptionError
from shim._matrix.load import PACKAGE
from shim._tools.fetching import fetched
from shim.testing.cells import EVERYDAY_PAIRS
from shim.testing.releases import environment, fetch
from shim.testing.repositories import archive

from ..prove_all import of_its_time
from .walk import Commit

__all__ = ["prove"]


def prove(repository: Path, distribution: str, commit: Commit, ids: Sequence[str], scratch: Path) -> dict[str, Any]:
    """What the proofs of these patches say on the commit, as a lock has it, and the CPU seconds that they took.

    scratch: a directory. What an interrupted run has measured stays there, and the next one goes on from it.
    OptionError if another process is at work there: each would unpack its commit over the other's.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with open(scratch / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(f"another `make history` runs its proofs in {scratch}. Remedy: wait for it") from error
        return _prove_alone(repository, distribution, commit, ids, scratch)


def _prove_alone(
    repository: Path, distribution: str, commit: Commit, ids: Sequence[str], scratch: Path
) -> dict[str, Any]:
    file = scratch / f"{commit.short}.json"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    tree = scratch / "tree"  # always the same place, because measurements name it
    shutil.rmtree(tree, ignore_errors=True)
    with zipfile.ZipFile(archive(repository, distribution, commit.hash, scratch)) as sources:
        sources.extractall(tree)
    version = open_tree(str(tree), fetched).environment.installed[distribution].raw
    done = subprocess.run(
        [sys.executable, "-m", "shim.maintenance.history.judge", str(tree), ",".join(ids), str(file)],
        env=environment([fetch(*_beside(distribution, version or "0")), PACKAGE.parent]),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        told: dict[str, Any] = {"releases": {}, "error": last[:300]}
    else:
        told = json.loads(file.read_text("utf-8"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    told["seconds"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    file.unlink(missing_ok=True)
    return told


def _beside(distribution: str, version: str) -> tuple[str, str]:
    """The release of the other distribution that is of the time of this version, and the name of that distribution."""
    at = Version(Version(version).base_version)
    if distribution == "megatron-core":
        return of_its_time(str(at)), "transformer-engine"
    pairs = sorted((Version(te), core) for core, _, te in (pair.partition("+") for pair in EVERYDAY_PAIRS))
    return next((core for te, core in reversed(pairs) if te <= at), pairs[0][1]), "megatron-core"
