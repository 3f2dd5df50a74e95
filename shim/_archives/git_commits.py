"""Sources of one commit, read by git from a git directory. No file is checked out, and nothing of the repository runs.

Detection never runs git. An audit does so only if a person names a commit.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from shim._archives.packed import HELD_LIMIT, LARGE, LINK, PackedSources, inner_path
from shim._errors import OptionError
from shim._releases.sources import MAX_SOURCE_BYTES

__all__ = ["ELSEWHERE", "QUIET", "SETTINGS", "Git", "is_bare", "open_commit"]

PATIENCE = 120  # seconds for one call of git
READ = ("megatron/core", "transformer_engine", "build_tools/VERSION.txt", "PKG-INFO")
# The commands below run no hooks, filters or text conversions, and read no index. The repository's configuration could
# still start a file system monitor, or the transport that fetches the missing objects of a partial clone.
QUIET = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never", "core.pager=cat")
# Variables that point git at another repository than the one named.
ELSEWHERE = (
    "GIT_DIR",
    "GIT_COMMON_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
# Replacements would give a commit other content than its name says.
SETTINGS = {
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


def is_bare(directory: Path) -> bool:
    """Whether `directory` is a git directory without files: a bare repository, or the .git of a checkout."""
    return (directory / "HEAD").is_file() and (directory / "objects").is_dir() and (directory / "refs").is_dir()


def open_commit(directory: Path, ref: str) -> PackedSources:
    """The sources of the commit that `ref` names in the repository at `directory`. OptionError says why there are none.

    If `directory` is inside a checkout, the packages may be in the same directory of the commit, or above it.
    """
    if not ref or ref.startswith("-") or not ref.isprintable():
        raise OptionError(f"--ref {ref!r} is no name of a commit; give a branch, a tag, or a commit")
    git = Git(directory)
    prefix = git.text("rev-parse", "--show-prefix")
    if prefix is None:
        remedy = "Remedy: name a git directory, or leave out --ref to audit the files as they are"
        raise OptionError(f"git reads no repository at {directory}: {git.complaint}. {remedy}")
    found = git.text("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if not found:
        more = f": {git.complaint}" if git.complaint else ""
        raise OptionError(f"{directory} has no commit {ref!r}{more}. Remedy: fetch it first, or name another --ref")
    return _sources_of(git, found, list(_and_above(prefix)), f"{directory} at {ref}")


def _and_above(prefix: str) -> Iterable[str]:
    """`prefix`, a directory with a slash at its end, and the directories above it, of which "" is the last."""
    while prefix:
        yield prefix
        prefix = prefix.rstrip("/").rpartition("/")[0]
        prefix += "/" if prefix else ""
    yield ""


def _sources_of(git: Git, commit: str, roots: Sequence[str], place: str) -> PackedSources:
    wanted: dict[str, str] = {}  # by name the object
    odd: dict[str, str] = {}
    total = 0
    paths = [root + path for root in roots for path in READ]
    # Sizes are asked for, because they limit the next read.
    listed = git.run("ls-tree", "-r", "-z", "-l", "--full-tree", commit, "--", *paths)
    if listed is None:
        remedy = "Remedy: fetch all of it, since an audit fetches nothing into a partial clone"
        raise OptionError(f"the commit {commit} cannot be read: {git.complaint}. {remedy}")
    for entry in listed.split(b"\0"):
        described, _, encoded = entry.partition(b"\t")
        name = encoded.decode("utf-8", "replace")
        if inner_path(name, roots) is None:
            continue
        mode, _, object_, size = described.decode("ascii", "replace").split()
        if not mode.startswith("100"):
            odd[name] = LINK
        elif int(size) > MAX_SOURCE_BYTES:
            odd[name] = LARGE
        else:
            wanted[name] = object_
            total += int(size)
    if total > HELD_LIMIT:
        what = f"{place} has more than {HELD_LIMIT} bytes of sources, which no release has"
        raise OptionError(f"{what}. Remedy: check it out and name its directory")
    return PackedSources(place, dict(zip(wanted, git.blobs(list(wanted.values())))), odd, roots, commit)


def _batch(contents: bytes, place: object) -> Iterable[bytes]:
    """The objects in the output of ``git cat-file --batch``: for each a line "object type size", and its content."""
    at = 0
    while at < len(contents):
        line_end = contents.index(b"\n", at)
        described = contents[at:line_end].decode("ascii", "replace").split()
        if len(described) != 3:
            what = " ".join(described)
            raise OptionError(f"{place} lacks an object ({what}). Remedy: fetch it; shim fetches nothing itself")
        size = int(described[2])
        yield contents[line_end + 1 : line_end + 1 + size]
        at = line_end + 1 + size + 1


class Git:
    """git in one directory. `complaint` is the message of the last failed call, in one line."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.complaint = ""

    def text(self, *arguments: str) -> str | None:
        found = self.run(*arguments)
        return None if found is None else found.decode("utf-8", "replace").rstrip("\n")

    def blobs(self, objects: Iterable[str]) -> Iterable[bytes]:
        """The contents of these objects, in their order. OptionError if one is missing."""
        contents = self.run("cat-file", "--batch", given="".join(f"{object_}\n" for object_ in objects).encode())
        if contents is None:
            remedy = "Remedy: name a sound clone"
            raise OptionError(f"the objects of {self._directory} cannot be read: {self.complaint}. {remedy}")
        return _batch(contents, self._directory)

    def run(self, *arguments: str, given: bytes = b"") -> bytes | None:
        """The output of git, or None if it fails. OptionError if there is no git, or it takes too long."""
        settings = [part for setting in QUIET for part in ("-c", setting)]
        command = ["git", "--no-pager", "-C", str(self._directory), *settings, *arguments]
        environ = {name: value for name, value in os.environ.items() if name not in ELSEWHERE} | SETTINGS
        try:
            done = subprocess.run(command, input=given, capture_output=True, env=environ, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            what = f"git {arguments[0]} in {self._directory} took more than {PATIENCE} seconds"
            raise OptionError(f"{what}. Remedy: check the commit out and name its directory") from None
        except OSError as error:
            remedy = "Remedy: install git, or check the commit out and name its directory"
            raise OptionError(f"--ref needs git, which cannot be run: {error}. {remedy}") from None
        said = done.stderr.decode("utf-8", "replace").split("\n")
        self.complaint = next((line.strip() for line in said if line.strip()), "") if done.returncode else ""
        return None if done.returncode else done.stdout
