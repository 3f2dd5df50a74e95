"""`shim pin --add` on the matrix that ships, with a real release in the place of the next one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recording import NO_SOURCES
from thorough import in_full

from shim._matrix.load import load_matrix, lock_path, matrix_path
from shim.testing import COMMITS, RELEASES, FetchError, at_hand, fetch

REPOSITORY = Path(__file__).parents[2]
NEWEST = RELEASES[-1]


@pytest.fixture(scope="module")
def next_release(tmp_path_factory):
    """The sources of the newest release, which call themselves 0.99.0."""
    try:
        newest = fetch(NEWEST)
    except FetchError as error:
        pytest.skip(f"{NO_SOURCES}megatron-core {NEWEST}: {error}")
    root = tmp_path_factory.mktemp("next")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(newest / "megatron" / "core", root / "megatron" / "core", ignore=ignored)
    info = root / "megatron" / "core" / "package_info.py"
    text = info.read_text()
    for name, number in (("MINOR", 99), ("PATCH", 0)):
        text, changed = re.subn(rf"^{name} = \d+$", f"{name} = {number}", text, flags=re.MULTILINE)
        assert changed == 1
    info.write_text(text)
    return root


def shim(*arguments, cwd=REPOSITORY, **variables):
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_SHIM_") or "CACHE" in name
    }
    env |= {"PYTHONPATH": str(cwd), **variables}
    command = [sys.executable, "-m", "shim", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_a_release_of_known_bodies_is_added_without_a_decision(next_release, tmp_path):
    """Every patch that the newest release gets, it gets: as many ranges are widened, and the matrix has no gap.

    Where a commit of tomorrow's release has another variant already, a person must say which one the release has.
    """
    matrix = load_matrix()
    pins = matrix.pins["megatron-core"]
    known, tomorrow = pins[NEWEST], pins[matrix.in_order("megatron-core", pins)[-1]]
    open_ones = {id for id in matrix.patches if id not in known or id not in tomorrow}
    open_ones |= {id for id in known.keys() & tomorrow.keys() if tomorrow[id].variant != known[id].variant}
    copy = tmp_path / "version_matrix.yaml"
    shutil.copy(matrix_path(), copy)
    shutil.copy(lock_path(matrix_path()), lock_path(copy))
    # Git may take what is on this machine: no commit is downloaded.
    done = shim("pin", "--add", "0.99.0", next_release, "--matrix", copy, "--json", GIT_ALLOW_PROTOCOL="file")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    unread = [f"{matrix.shown('megatron-core', name)} is not at hand" for name in COMMITS if not at_hand(name)]
    asked = [line for line in told["decide"] if not any(line.endswith(f": megatron-core {end}") for end in unread)]
    assert {line.partition(":")[0].partition(" ")[0] for line in asked} <= open_ones, asked
    assert (told["added"], told["read"], done.returncode) == ("0.99.0", {}, 1 if told["decide"] else 0)
    assert sorted(told["files"]) == sorted(map(str, (copy, lock_path(copy))))
    pins = load_matrix(copy, check_ranges=not told["decide"]).pins["megatron-core"]
    assert pins["0.99.0"] == {id: pin for id, pin in known.items() if id in pins["0.99.0"]}
    assert known.keys() - pins["0.99.0"].keys() <= open_ones and len(pins["0.99.0"]) > 8


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources of shim, in which files may change."""
    top = tmp_path / "shim"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("shim is no git checkout here")
    for name in filter(None, files.stdout.split("\0")):
        if (REPOSITORY / name).is_file() and not name.startswith("tests/"):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, top / name)
    return top


@in_full
def test_a_commit_is_added_with_its_documents(next_release, checkout, tmp_path):
    """In a checkout of shim: from a clone, with the tables and pages that `make pins docs` would write."""

    def git(*arguments):
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=next_release, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "-m", "the next release")
    hash = git("rev-parse", "HEAD")
    cache = str(tmp_path / "cache")
    done = shim(
        "pin", "--add", hash, next_release, "--note", "main, pinned by a trainer", "--json",
        cwd=checkout, MEGATRON_SHIM_CACHE=cache,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    written = {str(Path(file).relative_to(checkout)) for file in json.loads(done.stdout)["files"]}
    assert written >= {
        "version_matrix.yaml",
        "version_matrix.lock.json",
        "docs/releases.md",
    }
    assert f"{hash[:10]}: main, pinned by a trainer" in (checkout / "docs" / "releases.md").read_text("utf-8")
    assert shim("matrix", cwd=checkout).returncode == 0
    current = [sys.executable, "-m", "shim.maintenance.docs", "--check"]
    docs = subprocess.run(current, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True)
    assert docs.returncode == 0, docs.stdout


def without(recorded):
    """The pins, in which no list names the newest release."""
    if isinstance(recorded, dict):
        return {key: left for key, inner in recorded.items() if (left := without(inner))}
    return [name for name in recorded if name != NEWEST] if isinstance(recorded, list) else recorded


@in_full
def test_a_release_that_was_taken_out_comes_back_as_it_was(checkout):
    """With what proofs have shown: here nothing, as its bodies are those of the release before."""
    try:
        sources = fetch(NEWEST)
    except FetchError as error:
        pytest.skip(f"{NO_SOURCES}megatron-core {NEWEST}: {error}")
    matrix, pins = checkout / "version_matrix.yaml", checkout / "version_matrix.lock.json"
    before = matrix.read_text("utf-8"), pins.read_text("utf-8")
    matrix.write_text(re.sub(rf',\s*"{re.escape(NEWEST)}"\]', "]", before[0], count=1), "utf-8")
    pins.write_text(json.dumps(without(json.loads(before[1]))), "utf-8")
    lock = checkout / "new.lock"
    proved = shim("pin", "--prove", "--against", sources, "--only", "label-smoothing", "--lock", lock, cwd=checkout)
    assert proved.returncode == 0, proved.stderr
    command = [sys.executable, "-m", "shim.maintenance.release_of", NEWEST, str(sources), "--proved", str(lock)]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "To decide, 0;" in done.stdout and len(done.stdout.splitlines()) <= 30
    assert (matrix.read_text("utf-8"), pins.read_text("utf-8")) == before
