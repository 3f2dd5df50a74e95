"""Trainers' own commands on a CPU: three steps on a tiny model of the disk, stock and under `shim run`.

A command runs as a user gives it, by the trainer's own launcher. In each rank in_commands/sitecustomize.py makes a CPU
do. What trainers import beyond the libraries of the other tests is installed once, too.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import trainers

from shim.testing.patience import patience
from shim.testing.releases import environment

_INTEGRATION = Path(trainers.__file__).resolve().parents[1] / "integration"
SHIM_RUN = (sys.executable, "-m", "shim", "run", "--")


@functools.cache
def environ(names, core, te):
    """Variables of a command: `names` are trainers, as in trainers.directories."""
    path = [_INTEGRATION / "in_commands", trainers.libraries("commands.txt"), *trainers.directories(names, core, te)]
    if any(name.startswith(("verl", "areal", "miles")) for name in names):
        path.remove(trainers.STAND_INS)  # they want Ray itself
    kept = trainers.without_a_run(environment(path))
    return kept | {"PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def run(command, how, where, names, core, te, **variables):
    """What the command prints, in the directory `where`; how: "stock" or "shim run".

    Raises AssertionError with the end of its output if it fails.
    """
    command = [*(SHIM_RUN if how == "shim run" else ()), *map(str, command)]
    log = Path(where) / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=where,
            env=environ(tuple(names), core, te) | {"HF_HOME": str(where), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(patience())
        except subprocess.TimeoutExpired:
            code = "no end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a rank may wait for a helper that has failed
            process.wait()
    said = log.read_text(errors="replace")
    assert code == 0, f"{' '.join(command)} on {core} with {te}: {code}\n{said[-6000:]}"
    assert ("shim at the end: " in said) == (how == "shim run")
    return said


def torchrun(ranks):
    return sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def model(kind, where, names, core, te):
    """The directory of a new tiny model, with rows beside its files."""
    path = os.pathsep.join([str(trainers.libraries("commands.txt")), *map(str, trainers.directories(names, core, te))])
    trainers.run("tiny_models:make", kind, str(where), trainers=names, core=core, te=te, PYTHONPATH=path)
    return where


def off(steps, truth):
    """The largest relative difference of a number that a step prints."""
    return max(
        abs(a / b - 1) for step, right in zip(steps, truth, strict=True) for a, b in zip(step, right, strict=True)
    )
