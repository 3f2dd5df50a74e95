"""Sources of a commit, from a git directory on this machine or from the public repository. Nothing of them is run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["REPOSITORIES", "SECONDS", "GitError", "archive", "local_repository"]

SECONDS = 600  # a time limit for each git command
PACKED_TYPE = "zip"  # unlike a tar, a zip is unpacked without links and without paths outside the directory


class Repository(NamedTuple):
    """Where the sources of a distribution are: the public address, the directories in it that belong to it.

    variable: the environment variable that names a clone on this machine.
    """

    url: str
    variable: str
    directories: tuple[str, ...]


REPOSITORIES = {
    "megatron-core": Repository("https://github.com/NVIDIA/Megatron-LM.git", "SHIM_MEGATRON_GIT", ("megatron",)),
    "transformer-engine": Repository(
        "https://github.com/NVIDIA/TransformerEngine.git",
        "SHIM_TRANSFORMER_ENGINE_GIT",
        ("transformer_engine", "build_tools"),
    ),
}


class GitError(RuntimeError):
    """git is missing, has failed, or took too long."""


def local_repository(distribution: str, commit: str) -> Path | None:
    """The git directory that the environment names, if it has this commit. GitError where it is no git directory."""
    repository = REPOSITORIES[distribution]
    named = os.environ.get(repository.variable)
    if not named:
        return None
    directory = Path(named).expanduser()
    inside = directory / ".git"
    directory = inside if inside.exists() else directory
    try:
        _git("--git-dir", str(directory), "rev-parse", "--git-dir")
    except GitError as error:
        raise GitError(f"{repository.variable} is {named!r}, which is no git directory: {error}") from None
    try:
        _git("--git-dir", str(directory), "cat-file", "-e", f"{commit}^{{commit}}")
    except GitError:
        return None
    return directory


def archive(distribution: str, commit: str, scratch: Path, progress: Callable[[], None]) -> Path:
    """A zip in `scratch` with the sources of `commit`, 40 hexadecimal digits. `progress` is called before a download.

    Raises GitError with git's message.
    """
    repository = REPOSITORIES[distribution]
    found = local_repository(distribution, commit)
    if found is None:
        progress()
        found = scratch / "git"
        _git("init", "--quiet", "--bare", str(found))
        _git("--git-dir", str(found), "fetch", "--quiet", "--no-tags", "--depth", "1", repository.url, commit)
    file = scratch / f"{commit}.{PACKED_TYPE}"
    _git(
        "--git-dir",
        str(found),
        "archive",
        f"--format={PACKED_TYPE}",
        f"--output={file}",
        commit,
        *repository.directories,
    )
    return file


def _git(*arguments: str) -> None:
    # A prompt for a password would wait for ever. The variables of an outer git name another repository.
    outer = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment["GIT_TERMINAL_PROMPT"] = "0"
    try:
        done = subprocess.run(
            ["git", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise GitError(f"git took longer than {SECONDS} seconds") from None
    except OSError as error:
        raise GitError(f"git cannot be run: {error}") from None
    if done.returncode:
        raise GitError((done.stderr or done.stdout).strip() or f"git has exited with {done.returncode}")
