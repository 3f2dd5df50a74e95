"""Real trainers beside one release of megatron-core and Transformer Engine's Python layer, in processes of their own.

    facts = run("mcore_bridge_story:tell", "shim first", trainers=["mcore-bridge"], core="0.18.2", te="2.16.1")

calls `tell("shim first")` of tests/integration/mcore_bridge_story.py in a new process and returns what it returned,
through JSON. Who patched first is a matter of a whole process, so a story is told once per order, and tests ask of it.
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from shim.testing.patience import patience
from shim.testing.releases import FetchError, cache_dir, environment, fetch

VERSIONS = {"mcore-bridge": "1.6.5", "ms-swift": "4.6.0", "verl": "0.9.1", "liger-kernel": "0.8.5"}

_TESTS = Path(__file__).resolve().parents[1]
# Searched last: a library that is really there wins.
STAND_INS = _TESTS / "integration/stand_ins"


class StoryError(AssertionError):
    """A process failed; with the end of its output."""


@functools.cache
def libraries(name="libraries.txt"):
    """The directory with what trainers import, installed once into the cache, one per list and version of Python."""
    listed = _TESTS / "integration" / name
    wanted = listed.read_bytes()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    target = cache_dir() / "trainers" / f"libraries-{hashlib.sha256(wanted).hexdigest()[:12]}-{python}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".libraries-", dir=target.parent) as scratch:
        installed = Path(scratch) / "installed"
        command = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # Most of their modules are never imported, and byte code of all would take longer than all else here.
        command += ["--no-compile", "--only-binary", ":all:", "--target", str(installed), "--requirement", str(listed)]
        subprocess.run(command, check=True)
        try:
            installed.rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
    return target


def directories(trainers, core, te):
    """What goes on PYTHONPATH, in this order: the releases, the trainers, their libraries, and stand-ins.

    trainers: names of VERSIONS, or "name==version". core: None for the copy that a trainer brings. te: None for a
    process without Transformer Engine.
    """
    found = [*([fetch(core)] if core else []), *([fetch(te, "transformer-engine")] if te else [])]
    for trainer in trainers:
        name, _, version = trainer.partition("==")
        found.append(fetch(version or VERSIONS[name], name))
    return [*found, libraries(), STAND_INS, _TESTS / "integration", _TESTS / "support"]


@functools.cache
def _environment(trainers, core, te):
    return without_a_run(environment(directories(trainers, core, te)))


def without_a_run(environ):
    """A process's variables without those of the run that it belongs to, and with those that keep trainers offline."""
    left_out = ("MEGATRON_SHIM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_", "RAY_")
    kept = {name: value for name, value in environ.items() if not name.startswith(left_out)}
    if "MEGATRON_SHIM_CACHE" in environ:
        kept["MEGATRON_SHIM_CACHE"] = environ["MEGATRON_SHIM_CACHE"]
    # Nothing is fetched at run time, a trainer's own logger says only what matters, and nothing is compiled: seconds.
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return kept | offline | {"LOG_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"}


def run(story, *arguments, trainers, core, te, **variables):
    """What the function `story` ("module:function") returns in a process of its own. `variables` are set in it.

    Raises StoryError with the end of its output if it fails or does not end.
    """
    return _run_all(story, [arguments], tuple(trainers), core, te, variables, ranks=False)[0]


def run_ranks(story, each, *, trainers, core, te, **variables):
    """What `story` returns in each rank of a world, by rank, called with the arguments that `each` has for the rank.

    RANK, LOCAL_RANK and WORLD_SIZE are set, as a launcher sets them; `join()` makes the gloo group.
    """
    return _run_all(story, each, tuple(trainers), core, te, variables, ranks=True)


def join():
    """Make the gloo group of this process: of the world of run_ranks, else of this process alone."""
    import torch.distributed as dist

    if "SHIM_TEST_STORE" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["SHIM_TEST_STORE"], world)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world)


def _run_all(story, each, trainers, core, te, variables, ranks):
    try:
        environ = _environment(trainers, core, te) | variables
    except (FetchError, subprocess.CalledProcessError) as error:
        if "SHIM_TEST_SKIP_UNFETCHED" not in os.environ:
            raise
        import pytest  # here, because the process of a story runs this file too
        from recording import NO_SOURCES

        pytest.skip(f"{NO_SOURCES}{', '.join(trainers)}, or of their libraries: {error}")
    scratch = Path(tempfile.mkdtemp(prefix="shim-trainers-"))
    processes, outputs = [], []
    try:
        for rank, arguments in enumerate(each):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(each))} if ranks else {}
            mine |= {"SHIM_TEST_STORE": str(scratch / "store"), "GLOO_SOCKET_IFNAME": "lo"} if ranks else {}
            call = json.dumps([story, arguments, str(scratch / f"answer.{rank}")])
            output = (scratch / f"output.{rank}").open("w+")
            outputs.append(output)
            command = [sys.executable, "-W", "ignore", __file__, call]
            processes.append(
                subprocess.Popen(
                    command, env=environ | mine, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
            )
        _wait(processes, time.monotonic() + patience())
        answers = [scratch / f"answer.{rank}" for rank in range(len(each))]
        for rank, (process, answer, output) in enumerate(zip(processes, answers, outputs)):
            if process.returncode or not answer.exists():
                output.seek(0)
                ended = "did not end in time" if process.returncode is None else f"ended with {process.returncode}"
                tail = "\n".join(output.read().splitlines()[-60:])
                raise StoryError(f"{story}{tuple(each[rank])} on {core} with {te}, rank {rank}, {ended}\n{tail}")
        return [json.loads(answer.read_text()) for answer in answers]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for output in outputs:
            output.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _wait(processes, deadline):
    """Until all have ended, one has failed, or it is too late."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def _tell(story, arguments, answer):
    from shim import testing

    if find_spec("transformer_engine") is not None:
        testing.transformer_engine_on_cpu()  # before anything imports megatron
    module, _, name = story.partition(":")
    told = getattr(import_module(module), name)(*arguments)
    Path(answer).write_text(json.dumps(told))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a group of gloo may hang at the end of a process


if __name__ == "__main__":
    _tell(*json.loads(sys.argv[1]))
