"""Two patches that two people write at the same time: their commits merge, and what is generated is still current."""

import os
import shutil
import subprocess
import sys

import pytest
from thorough import in_full
from unit_helpers import REPOSITORY

from shim.maintenance.new_patch_text import MARK

ROUTER = "megatron.core.transformer.moe.router:"  # several patches bind names of it
TARGETS = {
    "router-jitter": f"{ROUTER}TopKRouter.apply_input_jitter",
    "sinkhorn-load": f"{ROUTER}TopKRouter.sinkhorn_load_balancing",
}


@pytest.fixture
def checkout(tmp_path):
    """A clone of this tree as it is, uncommitted changes included."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("shim is no git checkout here")
    top = tmp_path / "shim"
    for name in filter(None, files.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, top / name)
    git(top, "init", "--quiet", "--initial-branch=main")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "--message=before")
    return top


def git(top, *arguments):
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(top, *arguments):
    environ = {**os.environ, "PYTHONPATH": str(top)}
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=top, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_patch(top, id, target):
    """On a branch of its own: skeleton, pins, results and page, with something in each place to fill."""
    git(top, "switch", "--quiet", "--create", id, "main")
    python(top, "shim", "new-patch", id, "--target", target)
    folder = top / "patches" / "megatron_core" / id.replace("-", "_")
    (folder / "proved.json").write_text("{\n}\n")
    new = git(top, "ls-files", "--others", "--modified", "--exclude-standard").splitlines()
    for name in (name for name in new if not name.endswith(".json")):
        (top / name).write_text((top / name).read_text("utf-8").replace(MARK, "filled"), "utf-8")
    python(top, "shim", "pin", "--patch", id)
    python(top, "shim.maintenance.docs")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", f"--message={id}")
    return set(git(top, "diff", "--name-only", "main", id).splitlines())


@in_full
def test_two_new_patches_merge(checkout):
    """Each touches its folder, its range and pins, its page, its test and its fragment, and nothing else."""
    for id, target in TARGETS.items():
        name = id.replace("-", "_")
        folder = f"patches/megatron_core/{name}"
        assert write_patch(checkout, id, target) == {
            *(f"{folder}/{file}" for file in ("__init__.py", "patch.yaml", "proof.py", "proved.json")),
            "version_matrix.yaml",
            "version_matrix.lock.json",
            f"docs/patches/{id}.md",
            f"tests/cells/test_{name}.py",
            f"changes/{id}.added.md",
        }
    git(checkout, "switch", "--quiet", "main")
    for id in TARGETS:
        git(checkout, "merge", "--quiet", "--no-edit", id)
    python(checkout, "shim.maintenance.docs", "--check")
    found = python(checkout, "shim", "list")
    assert all(id in found for id in TARGETS)
    for id in TARGETS:
        assert "were current" in python(checkout, "shim", "pin", "--patch", id)
