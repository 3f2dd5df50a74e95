"""One line for each job: shim's version, how many patches, the releases, the digest, and how to do without."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from shim._engine.deferred_log import logger
from shim._engine.ranks import distributed_rank
from shim._planning.arguments import SAID

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["announce", "is_first_of_job", "line_for"]

# Of launchers; the first that is set counts. torchrun sets RANK, also below srun and mpirun.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
RUN = "/_workers/run"  # the end of the directory that `shim run` puts on PYTHONPATH


def announce(plan: Plan) -> bool:
    """Log the line at level INFO in the first process of a job, and return whether it has been said.

    Below `shim run` it goes to standard error while no logging is configured. Nothing is computed if nobody reads it.
    """
    if not is_first_of_job():
        return False
    below_run = _is_below_run()
    if not _say(lambda: line_for(plan), below_run):
        return False
    if below_run:
        os.environ[SAID] = "1"
    return True


def _say(line: Callable[[], str], below_run: bool) -> bool:
    """Log or print a line, and return whether somebody reads it."""
    log = logger()
    if log.isEnabledFor(20) and log.hasHandlers():  # INFO
        log.info("%s", line())
    elif below_run and not log.hasHandlers() and sys.stderr is not None:
        try:
            print(line(), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # closed, or nobody reads it
            return False
    else:
        return False
    return True


def line_for(plan: Plan) -> str:
    version = plan.identity["releases"]["megatron-shim"]
    if plan.options.disabled:
        return f"shim {version} is off, because MEGATRON_SHIM_DISABLE is set"
    number = sum(decision.wanted for decision in plan.decisions.values())
    releases = ", ".join(
        f"{name} {found.raw or 'of unknown version'}" for name, found in plan.environment.installed.items()
    )
    return (
        f"shim {version} applies {number} patch{'' if number == 1 else 'es'} to {releases or 'nothing installed'} "
        f"(digest {plan.digest}); without it: MEGATRON_SHIM_DISABLE=1, without a patch: MEGATRON_SHIM_EXCLUDE=ID"
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


def _is_below_run() -> bool:
    return any(entry.replace(os.sep, "/").endswith(RUN) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep))
