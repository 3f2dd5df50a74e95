"""The proofs of some patches on one commit: its sources in a directory for as long as they run."""

from __future__ import annotations

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

from shim._matrix.load import PACKAGE
from shim._releases.detect import version_in_package_info
from shim.testing.releases import environment, fetch
from shim.testing.repositories import archive

from ..prove_all import of_its_time
from .walk import Commit

__all__ = ["prove"]


def prove(repository: Path, distribution: str, commit: Commit, ids: Sequence[str], scratch: Path) -> dict[str, Any]:
    """What the proofs of these patches say on the commit, as a lock has it, and the CPU seconds that they took.

    scratch: a directory. What an interrupted run has measured stays there, and the next one goes on from it.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / f"{commit.short}.json"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    tree = scratch / "tree"  # always the same place, because measurements name it
    shutil.rmtree(tree, ignore_errors=True)
    with zipfile.ZipFile(archive(repository, distribution, commit.hash, scratch)) as sources:
        sources.extractall(tree)
    done = subprocess.run(
        [sys.executable, "-m", "shim.maintenance.history.judge", ",".join(ids), str(file)],
        env=environment([tree, fetch(_beside(tree), "transformer-engine"), PACKAGE.parent]),
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


def _beside(tree: Path) -> str:
    """The release of Transformer Engine of the commit's time."""
    said = version_in_package_info((tree / "megatron/core/package_info.py").read_text("utf-8"))
    return of_its_time(str(Version(said or "0.12").base_version))
