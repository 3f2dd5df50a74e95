"""Sources of a commit, from a git directory on this machine or from the public repository. Nothing of them is run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shim._archives.git_commits import ELSEWHERE, QUIET, SETTINGS

__all__ = ["REPOSITORIES", "SECONDS", "GitError", "archive", "described", "local_repository", "obtain"]

SECONDS = 600  # a time limit for each git command
PACKED_TYPE = "zip"  # unlike a tar, a zip is unpacked without links and without paths outside the directory


class Repository(NamedTuple):
    """Where the sources of a distribution are: the public address, the directories in it that belong to it.

    variable: the environment variable that names a clone on this machine.
    needs_metadata: whether the package's import reads its metadata, which only an installation has.
    """

    url: str
    variable: str
    directories: tuple[str, ...]
    needs_metadata: bool = False


REPOSITORIES = {
    "megatron-core": Repository("https://github.com/NVIDIA/Megatron-LM.git", "SHIM_MEGATRON_GIT", ("megatron",)),
    "transformer-engine": Repository(
        "https://github.com/NVIDIA/TransformerEngine.git",
        "SHIM_TRANSFORMER_ENGINE_GIT",
        ("transformer_engine", "build_tools"),
        needs_metadata=True,
    ),
}


class GitError(RuntimeError):
    """git is missing, has failed, or took too long."""


def local_repository(distribution: str, commit: str, clone: Path | None = None) -> Path | None:
    """The git directory that `clone`, or else the environment, names, if it has this commit, or one that begins so.

    GitError if it is no git directory.
    """
    variable = REPOSITORIES[distribution].variable
    named = str(clone) if clone is not None else os.environ.get(variable)
    if not named:
        return None
    directory = Path(named).expanduser()
    inside = directory / ".git"
    directory = inside if inside.exists() else directory
    try:
        _git(directory, "rev-parse", "--git-dir")
    except GitError as error:
        what = named if clone is not None else f"{variable} is {named!r}, which"
        raise GitError(f"{what} is no git directory: {error}") from None
    try:
        _git(directory, "cat-file", "-e", f"{commit}^{{commit}}")
    except GitError:
        return None
    return directory


def obtain(
    distribution: str, commit: str, scratch: Path, progress: Callable[[], None], clone: Path | None = None
) -> Path:
    """A git directory with the commit: a clone on this machine, else a new one in `scratch` from the public repository.

    progress: called before a download.    clone: a clone to use instead of the one that the environment names.

    Raises GitError with git's message.
    """
    found = local_repository(distribution, commit, clone)
    if found is None:
        progress()
        found = scratch / "git"
        url = REPOSITORIES[distribution].url
        _git(None, "init", "--quiet", "--bare", str(found))
        _git(found, "fetch", "--quiet", "--no-tags", "--depth", "1", url, commit, offline=False)
    return found


def described(repository: Path, commit: str) -> tuple[str, str]:
    """The 40 digits of a commit and its day, 2026-08-22, in UTC."""
    said = _git(repository, "show", "--no-patch", "--format=%H %cd", "--date=format-local:%Y-%m-%d", commit, "--")
    hash, _, day = said.strip().partition(" ")
    return hash, day


def archive(repository: Path, distribution: str, commit: str, scratch: Path) -> Path:
    """A zip in `scratch` with the sources of `commit`. Raises GitError with git's message."""
    file = scratch / f"sources.{PACKED_TYPE}"
    directories = REPOSITORIES[distribution].directories
    _git(repository, "archive", f"--format={PACKED_TYPE}", f"--output={file}", commit, *directories)
    return file


def _git(directory: Path | None, *arguments: str, offline: bool = True) -> str:
    """The output of git, without hooks and prompts. `offline` keeps a partial clone from fetching."""
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    environment |= SETTINGS if offline else {"GIT_TERMINAL_PROMPT": "0"}
    environment["TZ"] = "UTC"
    command = ["git", *(part for setting in QUIET if offline for part in ("-c", setting))]
    command += [] if directory is None else ["--git-dir", str(directory)]
    try:
        done = subprocess.run(
            [*command, *arguments],
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
    return done.stdout
