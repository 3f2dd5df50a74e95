"""Proof of recompute-helper-build."""

from __future__ import annotations

import os
import tempfile
import time
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch

from shim._torch_names import find
from shim.testing.proof import CannotRunError, Here, proof

OLD = 3600  # seconds


class WaitsForeverError(RuntimeError):
    """torch waits for a lock that nobody releases."""


def _gives_up(seconds: float) -> None:
    raise WaitsForeverError(f"torch waits {seconds} s, and again")


def refilled_behind_a_stale_lock() -> int:
    """Values that are wrong after an output has been refilled, behind a lock that a killed process has left."""
    random = import_module("megatron.core.tensor_parallel.random")
    if not hasattr(random, "_get_share_storage"):
        raise CannotRunError("this release copies outputs and compiles nothing")
    if find("torch.utils.cpp_extension:FileBaton") is None:
        raise CannotRunError(f"torch {torch.__version__.partition('+')[0]} leaves no lock behind (up to 2.13)")
    with tempfile.TemporaryDirectory() as directory:
        lock = Path(directory, "share_storage_ext", "lock")
        lock.parent.mkdir()
        lock.touch()
        os.utime(lock, (time.time() - OLD,) * 2)
        with (
            mock.patch.dict(os.environ, {"TORCH_EXTENSIONS_DIR": directory}),
            mock.patch.object(random, "_share_storage_ext", None),
            mock.patch.object(time, "sleep", _gives_up),
        ):
            right = torch.arange(6.0)
            output = right.clone()
            output.untyped_storage().resize_(0)
            random._get_share_storage()(output, right)
    return int((output != right).sum())


@proof(
    "{:.0f} values wrong",
    right="the output is refilled",
    defect="crash",
    crashes=r"^WaitsForeverError: torch waits",
)
def outputs_are_refilled_behind_a_stale_lock(here: Here) -> int:
    """Recompute waits for ever if a process was killed while it compiled a helper.

    To reproduce: put an empty file `lock` into the directory `share_storage_ext` of torch's extensions
    (TORCH_EXTENSIONS_DIR), as a killed process leaves it, and call `_get_share_storage()` of
    megatron.core.tensor_parallel.random, as the first recompute by CheckpointWithoutOutput does.

    `load_inline` waits until the file is gone. Nobody says so, and nobody removes it: backward hangs in this run, and
    in all later ones. Here an error ends the wait. Right are outputs with the recomputed values.

    From 0.17 to 0.19, with torch up to 2.13, whose lock is a file. Before 0.17 outputs are copied, and nothing is
    compiled. From torch 2.14 on the system ends a lock with its process.
    """
    return here.run(refilled_behind_a_stale_lock)[0]
