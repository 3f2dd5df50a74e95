"""Environments with another torch on another Python, made once with pip and kept in the cache; and cells in them:

    python -m shim.maintenance.other_torch --torch 2.9.1 --python 3.12 --releases 0.18.2 -- -q tests

Each is a virtual environment of some GB, because the builds of torch on the package index are for CUDA. They also run
on a CPU. Any number of source trees share one: shim is not installed in it, its tree is put on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from shim.testing import cells
from shim.testing.releases import FetchError, cache_dir

__all__ = ["Environment", "interpreter", "is_at_hand", "main", "made", "needs"]

_REQUIREMENTS = Path(__file__).parents[1] / "tests" / "requirements.txt"
_THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

# Written last, with the requirements that were installed.
_COMPLETE = ".complete"
# What an environment gets in the wanted version, or what torch brings in the right one.
_OF_TORCH = re.compile(r"(torch|triton)\s*([=<>!~;].*)?")
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True)
class Environment:
    """A release of torch on a version of Python: "2.6.0" on "3.10"."""

    torch: str
    python: str

    def __str__(self) -> str:
        return f"torch {self.torch} on Python {self.python}"

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"

    @property
    def directory(self) -> Path:
        return cache_dir() / "environments" / self.name


def needs(requirements: Path) -> list[str]:
    """The lines of a file of requirements, without torch and triton, which an environment has in other versions."""
    lines = [line.partition("#")[0].strip() for line in requirements.read_text("utf-8").splitlines()]
    return [line for line in lines if line and not _OF_TORCH.fullmatch(line)]


def interpreter(python: str) -> Path | None:
    """An interpreter of this version that runs, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    on_path = shutil.which(f"python{python}")
    found = [Path(on_path)] if on_path else []
    for candidate in [*found, *sorted((pyenv / "versions").glob(f"{python}.*/bin/python"))]:
        said = subprocess.run([candidate, "-c", _VERSION], capture_output=True, text=True)
        if said.stdout.strip() == python:
            return candidate
    return None


def is_at_hand(environment: Environment) -> bool:
    """Whether the environment has been made, so that `made` downloads at most a package that is new in the needs."""
    return (environment.directory / _COMPLETE).exists()


def made(environment: Environment, needed: Sequence[str], say: Callable[[str], None] = print) -> Path:
    """The interpreter of the environment, which is made if it is missing, and completed if it lacks something.

    needed: the requirements beside torch, see `needs`. Several processes may ask for the same environment at once.

    Raises FetchError if there is no such interpreter, or if pip cannot install, with pip's message.
    """
    home = environment.directory
    home.parent.mkdir(parents=True, exist_ok=True)
    needed = [*needed, *_beside(environment.torch)]
    python, wanted = home / "bin" / "python", "\n".join(sorted(needed)) + "\n"
    with _alone(home.parent / f"{home.name}.lock"):
        if is_at_hand(environment) and (home / _COMPLETE).read_text("utf-8") == wanted:
            return python
        if not python.exists():
            say(f"making the environment of {environment}")
            _run([_found(environment), "-m", "venv", str(home)], environment)
        # No cache of pip: it would keep each of these gigabytes a second time.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        _run([*pip, f"torch=={environment.torch}", *needed], environment)
        (home / _COMPLETE).write_text(wanted, "utf-8")
    return python


def _beside(torch: str) -> list[str]:
    """What a release of torch cannot do without, and does not ask for."""
    # The interpreter of Triton 3.5, which comes with torch 2.9, fails with numpy 2.4 and later.
    return ["numpy<2.4"] if Version(torch) < Version("2.12") else []


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _found(environment: Environment) -> str:
    found = interpreter(environment.python)
    if found is None:
        raise FetchError(
            f"no Python {environment.python} for {environment}: put python{environment.python} on PATH, or install it "
            f"with pyenv."
        )
    return str(found)


def _run(command: Sequence[str], environment: Environment) -> None:
    # What this process imports is of another Python.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:]) or "it said nothing"
        raise FetchError(
            f"could not make the environment of {environment}:\n{said}\n"
            f"Check the network, and a constraint on torch in pip's settings (python -m pip config list)."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """As `python -m shim.testing.cells`, with --torch."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.other_torch", description=__doc__)
    parser.add_argument("--torch", metavar="VERSION", required=True, help="this torch")
    parser.add_argument("--python", metavar="VERSION", default=_THIS_PYTHON, help="this Python (default: this one)")
    parser.add_argument("--requirements", type=Path, metavar="FILE", default=_REQUIREMENTS, help="what else it has")
    parser.add_argument("--if-made", action="store_true", help="only say so if the environment is not made yet")
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    options, rest = parser.parse_known_args(given[:split])
    chosen = Environment(options.torch, options.python)
    if options.if_made and not is_at_hand(chosen):
        print(f"skipped: {chosen} (make environments makes it, with some GB)", flush=True)
        return 0
    try:
        python = made(chosen, needs(options.requirements))
    except (FetchError, OSError) as error:
        print(error, flush=True)
        return 1
    print(f"{chosen}:", flush=True)
    return cells.main(["--logs", str(cache_dir() / "logs" / chosen.name), *rest, *given[split:]], python)


if __name__ == "__main__":
    sys.exit(main())
