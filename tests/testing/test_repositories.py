"""Sources of commits, from real git repositories on this machine, one of them in the place of the public one."""

import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from shim._matrix.declared import Commit
from shim.testing import FetchError, at_hand, environment, fetch, releases, repositories
from shim.testing.releases import fetch_commit
from shim.testing.repositories import GitError, archive, described, local_repository, obtain


def git(directory, *arguments, env=None):
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=directory, capture_output=True, text=True, check=True, env=env)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """A repository with two commits; the first is that of `clone.commit`."""

    class Clone:
        path = tmp_path / "clone"
        commit = ""

    core = Clone.path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('run')\n")
    (core / "link.py").symlink_to("/etc/passwd")
    (Clone.path / "setup.py").write_text("raise RuntimeError('run')\n")
    git(Clone.path, "init", "--quiet", "--initial-branch=main")
    git(Clone.path, "add", ".")
    git(Clone.path, "commit", "--quiet", "-m", "one")
    Clone.commit = git(Clone.path, "rev-parse", "HEAD")
    (core / "__init__.py").write_text("later = 1\n")
    git(Clone.path, "commit", "--quiet", "-am", "two")
    return Clone


@pytest.fixture
def known(cache, clone, monkeypatch):
    """The matrix has the commit; there is no public repository."""
    name = clone.commit[:10]
    commits = {"megatron-core": {name: Commit(name, clone.commit, "9.9.0.dev0", "2026-01-01", "main")}}
    monkeypatch.setattr(releases, "_MATRIX", replace(releases._MATRIX, commits=commits))
    monkeypatch.delenv("SHIM_MEGATRON_GIT", raising=False)
    public = repositories.REPOSITORIES["megatron-core"]._replace(url=str(cache / "nowhere"))
    monkeypatch.setitem(repositories.REPOSITORIES, "megatron-core", public)
    return name


def public(monkeypatch, path):
    changed = repositories.REPOSITORIES["megatron-core"]._replace(url=path.as_uri())
    monkeypatch.setitem(repositories.REPOSITORIES, "megatron-core", changed)


def check(directory):
    package = directory / "megatron" / "core"
    assert (package / "__init__.py").read_text() == "raise RuntimeError('run')\n"
    assert not (package / "link.py").is_symlink() and not (directory / "setup.py").exists()
    assert not (directory / ".git").exists()


@pytest.mark.parametrize("inside", ["", ".git"])
def test_a_commit_comes_from_the_clone_that_is_named(known, clone, cache, monkeypatch, inside):
    """The commit itself, not what is checked out; only its packages; nothing of it runs, and no link is made."""
    monkeypatch.setenv("SHIM_MEGATRON_GIT", str(clone.path / inside))
    said = []
    assert at_hand(known)
    directory = fetch(known, progress=said.append)
    assert directory == cache / "megatron-core" / known and said == []
    check(directory)


def test_a_commit_in_the_cache_needs_no_git(known, clone, monkeypatch):
    monkeypatch.setenv("SHIM_MEGATRON_GIT", str(clone.path))
    directory = fetch(known)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("SHIM_MEGATRON_GIT")
    assert fetch(known) == directory and at_hand(known)


def test_a_commit_comes_from_the_public_repository(known, clone, monkeypatch):
    """Its one commit alone. A stand-in without network: the clone plays the public repository."""
    git(clone.path, "config", "uploadpack.allowAnySHA1InWant", "true")
    public(monkeypatch, clone.path)
    said = []
    assert not at_hand(known)
    check(fetch(known, progress=said.append))
    assert said == [f"fetching megatron-core commit {known} (main of 2026-01-01)"]


def test_a_clone_without_the_commit_is_passed_over(known, clone, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    git(tmp_path, "init", "--quiet", str(empty))
    monkeypatch.setenv("SHIM_MEGATRON_GIT", str(empty))
    git(clone.path, "config", "uploadpack.allowAnySHA1InWant", "true")
    public(monkeypatch, clone.path)
    assert local_repository("megatron-core", clone.commit) is None and not at_hand(known)
    check(fetch(known))


def test_without_any_repository_the_error_says_what_to_do(known, cache):
    with pytest.raises(FetchError) as caught:
        fetch(known)
    text = str(caught.value)
    assert "could not get megatron-core at commit" in text and "nowhere" in text
    assert "SHIM_MEGATRON_GIT" in text and str(cache / "megatron-core" / known) in text and ".complete" in text
    assert [path.name for path in (cache / "megatron-core").iterdir()] == []


def test_a_directory_that_is_no_repository_is_an_error(known, tmp_path, monkeypatch):
    """Whoever named it did not mean the public repository."""
    monkeypatch.setenv("SHIM_MEGATRON_GIT", str(tmp_path))
    with pytest.raises(FetchError, match=r"SHIM_MEGATRON_GIT is .* which is no git directory"):
        fetch(known)
    assert not at_hand(known)


def test_git_is_missing(known, clone, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match="git cannot be run"):
        fetch(known)


def test_git_has_a_limit_of_time(clone, tmp_path, monkeypatch):
    """A stand-in that never ends."""
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr(repositories, "SECONDS", 0.2)
    with pytest.raises(GitError, match=r"took longer than 0\.2 seconds"):
        archive(clone.path / ".git", "megatron-core", clone.commit, tmp_path)


def test_the_git_around_a_call_does_not_count(known, clone, tmp_path, monkeypatch):
    """A hook of git, or a rebase, names its own repository in the environment."""
    monkeypatch.setenv("SHIM_MEGATRON_GIT", str(clone.path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    check(fetch(known))


def test_a_commit_that_the_matrix_does_not_have_is_refused(known, pip):
    with pytest.raises(FetchError, match=rf"'deadbeef00' is no version .* in the matrix: {known}"):
        fetch("deadbeef00")
    assert not pip.calls


def test_a_wheel_is_at_hand_without_network(cache, pip):
    assert not at_hand("0.16.1")
    fetch("0.16.1")
    assert at_hand("0.16.1")
    (cache / "megatron-core" / "0.16.1" / ".complete").unlink()
    assert at_hand("0.16.1")  # its wheel is still there


def test_an_archive_holds_the_directories_of_the_distribution(clone, tmp_path):
    with zipfile.ZipFile(archive(clone.path / ".git", "megatron-core", clone.commit, tmp_path)) as found:
        assert {name.partition("/")[0] for name in found.namelist()} == {"megatron"}


def test_a_commit_is_described_by_its_digits_and_its_day(clone, tmp_path):
    """In UTC, wherever the machine is; the day it was committed, as the history orders it."""
    late = {"GIT_COMMITTER_DATE": "2026-03-01T23:30:00-05:00", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+00:00"}
    git(clone.path, "commit", "--quiet", "--allow-empty", "-m", "three", env={**os.environ, **late})
    hash = git(clone.path, "rev-parse", "HEAD")
    found = obtain("megatron-core", hash[:10], tmp_path, lambda: None, clone.path)
    assert found == clone.path / ".git"
    assert described(found, hash[:10]) == (hash, "2026-03-02")


def test_sources_of_transformer_engine_have_metadata(cache, clone, monkeypatch):
    """It asks for its own version when it is imported; a source tree alone has none."""
    engine = clone.path / "transformer_engine"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    (clone.path / "build_tools").mkdir()
    (clone.path / "build_tools" / "VERSION.txt").write_text("9.8.0\n")
    git(clone.path, "add", ".")
    git(clone.path, "commit", "--quiet", "-m", "engine")
    hash = git(clone.path, "rev-parse", "HEAD")
    directory = fetch_commit(
        Commit(hash[:10], hash, "9.8.0", "2026-01-01", "tag"), "transformer-engine", None, clone.path
    )
    code = "from importlib.metadata import version; print(version('transformer-engine'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(directory), capture_output=True, text=True)
    assert done.stdout == "9.8.0\n", done.stderr
