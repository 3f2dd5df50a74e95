"""Real releases and commits of megatron-core and Transformer Engine on disk, fetched once, unpacked side by side."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shim._matrix.declared import Commit
from shim._matrix.load import load_matrix
from shim._releases.versions import parse_version

from .repositories import REPOSITORIES, GitError, archive, local_repository, obtain

__all__ = [
    "COMMITS",
    "RELEASES",
    "TE_RELEASES",
    "FetchError",
    "at_hand",
    "cache_dir",
    "environment",
    "fetch",
    "fetch_commit",
]

_MATRIX = load_matrix(pins=False)
RELEASES = _MATRIX.supported["megatron-core"]
# TE releases; the wheel of the distribution transformer-engine has all Python sources.
TE_RELEASES = _MATRIX.supported["transformer-engine"]
# Commits of megatron-core that shim is pinned to, oldest first.
COMMITS = tuple(_MATRIX.commits.get("megatron-core", ()))

# Written last into an unpacked release. A directory without the file is incomplete.
_COMPLETE = ".complete"


class FetchError(RuntimeError):
    """A release or commit is not in the cache and could not be downloaded."""


def cache_dir() -> Path:
    """$MEGATRON_SHIM_CACHE, else megatron-shim in the user's cache directory. It may not exist yet."""
    chosen = os.environ.get("MEGATRON_SHIM_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "megatron-shim"


def at_hand(release: str, distribution: str = "megatron-core") -> bool:
    """Whether `fetch` needs no network for a release or commit: it is in the cache, or in a clone on this machine."""
    home = cache_dir() / distribution
    if (home / release / _COMPLETE).exists():
        return True
    commit = _MATRIX.commits.get(distribution, {}).get(release)
    if commit is None:
        return _cached_wheel(home / "wheels", distribution, release) is not None
    try:
        return local_repository(distribution, commit.commit) is not None
    except GitError:
        return False


def fetch(release: str, distribution: str = "megatron-core", progress: Callable[[str], None] | None = None) -> Path:
    """The directory with `distribution` at `release`, to put on PYTHONPATH; downloaded if missing.

    release: a version, or the name of a commit that the matrix has.

    Fetches a release with pip: only the wheel, without dependencies, for any Python version that the wheel requires,
    because releases that require 3.12 also run on 3.10 and 3.11. Fetches a commit with git: from the clone that
    SHIM_MEGATRON_GIT or SHIM_TRANSFORMER_ENGINE_GIT names, else from the public repository. Works offline once cached.
    Several processes may fetch the same release at once. `progress` is called with one line before a download.

    Raises FetchError with the message of pip or git, and a remedy.
    """
    home = cache_dir() / distribution
    target = home / release
    if (target / _COMPLETE).exists():
        return target
    commit = _MATRIX.commits.get(distribution, {}).get(release)
    if commit is not None:
        return fetch_commit(commit, distribution, progress)
    if parse_version(release) is None:
        known = ", ".join(_MATRIX.commits.get(distribution, ())) or "none"
        raise FetchError(f"{release!r} is no version of {distribution}, nor one of the commits in the matrix: {known}.")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=home) as scratch_name:
        scratch = Path(scratch_name)
        wheel = _cached_wheel(home / "wheels", distribution, release)
        if wheel is None:
            if progress is not None:
                progress(f"fetching {distribution} {release}")
            wheel = _download(distribution, release, scratch / "wheel")
            kept = home / "wheels" / wheel.name
            kept.parent.mkdir(exist_ok=True)
            wheel = wheel.replace(kept)
        _publish(_unpacked(wheel, scratch), target)
    return target


def fetch_commit(
    commit: Commit,
    distribution: str = "megatron-core",
    progress: Callable[[str], None] | None = None,
    clone: Path | None = None,
) -> Path:
    """The directory with the sources of `commit`, as `fetch` gives it. `clone` is a git directory that has it."""
    home = cache_dir() / distribution
    target = home / commit.name
    if (target / _COMPLETE).exists():
        return target
    home.mkdir(parents=True, exist_ok=True)

    def say() -> None:
        if progress is not None:
            progress(f"fetching {distribution} {commit}")

    with tempfile.TemporaryDirectory(prefix=f".{commit.name}-", dir=home) as scratch_name:
        scratch = Path(scratch_name)
        try:
            repository = obtain(distribution, commit.commit, scratch, say, clone)
            unpacked = _unpacked(archive(repository, distribution, commit.commit, scratch), scratch)
        except GitError as error:
            variable = REPOSITORIES[distribution].variable
            raise FetchError(
                f"could not get {distribution} at commit {commit.commit}:\n{error}\n"
                f"Check the network, or name a clone that has the commit in {variable}, or unpack its sources into "
                f"{target} and put an empty file {_COMPLETE} there."
            ) from None
        if REPOSITORIES[distribution].needs_metadata:
            _write_metadata(unpacked, distribution, commit)
        _publish(unpacked, target)
    return target


def _unpacked(packed: Path, scratch: Path) -> Path:
    """The content of a wheel or a zip, in a directory in `scratch`."""
    unpacked = scratch / "unpacked"
    try:
        with zipfile.ZipFile(packed) as opened:
            opened.extractall(unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{packed} is damaged: {error}. Delete it, and it will be downloaded again.") from None
    return unpacked


def _write_metadata(directory: Path, distribution: str, commit: Commit) -> None:
    """The part of an installation's metadata that tells the version, as the sources state it."""
    stated = directory / "build_tools" / "VERSION.txt"
    version = stated.read_text("utf-8").strip() if stated.is_file() else commit.version
    home = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
    home.mkdir()
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", "utf-8")


def _cached_wheel(wheels: Path, distribution: str, release: str) -> Path | None:
    """A wheel from an earlier download, or one put there by hand on a machine without network."""
    found = sorted(wheels.glob(f"{distribution.replace('-', '_')}-{release}-*.whl"))
    return next((wheel for wheel in found if zipfile.is_zipfile(wheel)), None)


def _download(distribution: str, release: str, into: Path) -> Path:
    # -I, because otherwise -m would run a pip.py of the audited tree, if that is the working directory.
    command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--ignore-requires-python", "--only-binary", ":all:"]
    command += ["--dest", str(into), f"{distribution}=={release}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        said = _without_list((done.stderr or done.stdout).strip()) or "pip said nothing"
        raise FetchError(
            f"could not download {distribution} {release}:\n{said}\n"
            f"Check the network and pip's index settings, or put the wheel into {into.parents[1] / 'wheels'}."
        )
    return wheels[0]


def _without_list(said: str) -> str:
    """pip's message, with the newest few of the versions that it lists: megatron-core has more than two hundred."""

    def newest(listed: re.Match[str]) -> str:
        versions = listed[1].split(", ")
        return ", ".join(versions if len(versions) <= 5 else ["...", *versions[-5:]])

    return re.sub(r"(?<=\(from versions: )([^()]*)", newest, said)


def _publish(unpacked: Path, target: Path) -> None:
    """Mark it complete, and rename it into place. A second process finds a complete directory and leaves it."""
    (unpacked / _COMPLETE).touch()
    while not (target / _COMPLETE).exists():
        try:
            unpacked.rename(target)
        except OSError:
            # A complete directory has appeared, or an incomplete one is in the way: check again.
            if not (target / _COMPLETE).exists():
                shutil.rmtree(target, ignore_errors=True)
                if not unpacked.exists():
                    raise


def environment(
    release_dirs: Path | str | Sequence[Path | str], base_env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a subprocess that imports the releases in `release_dirs` before any other.

    Each directory has one distribution, such as megatron-core or Transformer Engine. `base_env` defaults to this
    process's environment. Processes get one thread each, because cells run side by side.
    """
    env = dict(os.environ if base_env is None else base_env)
    first = [release_dirs] if isinstance(release_dirs, (str, Path)) else release_dirs
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, first), env.get("PYTHONPATH", "")]))
    env["OMP_NUM_THREADS"] = "1"
    env["NO_VCS_VERSION"] = "1"  # else the version from 0.18 on has the git revision of the surrounding tree
    # 0.15 compiles for CUDA at its import. With nvcc and no GPU, torch knows no architecture for it and raises.
    env.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a recompile of megatron costs seconds per process
    env.pop("PYTHONOPTIMIZE", None)  # without its assertions megatron silently computes nonsense
    return env
