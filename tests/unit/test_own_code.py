"""The digest is over all code of shim that can change what is bound or computed, whatever kind of install it is."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import times
from unit_helpers import BROKEN, PATCH, REPOSITORY, megatron, output_of, write_file

from shim._planning import digest
from shim._planning.digest import BESIDE, differing_parts, file_digest, files_below, own_files

SKIPPED = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def as_a_tree(tmp_path_factory):
    """A copy of shim as a source tree: the patches and the rules lie beside the package."""
    top = tmp_path_factory.mktemp("tree")
    for name in ("shim", "patches"):
        shutil.copytree(REPOSITORY / name, top / name, ignore=SKIPPED)
    for name in ("version_matrix.yaml", "version_matrix.lock.json"):
        shutil.copyfile(REPOSITORY / name, top / name)
    return top


@pytest.fixture(scope="module")
def as_a_wheel(as_a_tree, tmp_path_factory):
    """The same as a wheel installs it: all inside of the package."""
    top = tmp_path_factory.mktemp("wheel")
    shutil.copytree(as_a_tree / "shim", top / "shim")
    shutil.copytree(as_a_tree / "patches", top / "shim" / "patches")
    for name in ("version_matrix.yaml", "version_matrix.lock.json"):
        shutil.copyfile(as_a_tree / name, top / "shim" / name)
    return top


@pytest.fixture
def of(monkeypatch):
    """The hash of each part of the shim at a place."""

    def at(top):
        inside = top / "shim" if (top / "shim" / "patches").is_dir() else top
        monkeypatch.setattr(digest, "PACKAGE", top / "shim")
        monkeypatch.setattr(digest, "patches_path", lambda: inside / "patches")
        monkeypatch.setattr(digest, "matrix_path", lambda: inside / "version_matrix.yaml")
        return digest.own_code(digest.own_digests())

    return at


# Those that a job loads.
ROOMS = (
    "_config_override",
    "_configs",
    "_engine",
    "_matrix",
    "_offload",
    "_planning",
    "_printing",
    "_releases",
    "_te",
    "_workers",
    "ops",
    "patches",
)


def test_every_room_of_the_package_is_in_one_of_the_lists():
    """Whoever adds a room says whether a job's patches can depend on it."""
    rooms = {path.name for path in (REPOSITORY / "shim").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms | {"patches"} == set(ROOMS) | {name for name in BESIDE if not name.endswith(".py")}
    assert not set(ROOMS) & set(BESIDE)


def test_what_does_not_count_is_imported_by_nothing_that_does():
    """By no line of a file that counts, and by no process that applies, reports and checks; no patch loads a proof."""
    of_proofs = re.compile(r"(from|import)\b.*\b(proof\b|_proof_)")
    beside = tuple(f"{start} shim.{name.removesuffix('.py')}" for name in BESIDE for start in ("from", "import"))
    for name, file in own_files():
        lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines() if name.endswith(".py")]
        assert not [line for line in lines if line.startswith(beside) or of_proofs.match(line)], name
    code = "import sys, shim; shim.apply(); shim.check(); shim.checkpoint_state(); print(*sys.modules)"
    loaded = [name for name in output_of(code).split() if name.startswith("shim.")]
    assert "shim._engine.transactions" in loaded
    assert not [name for name in loaded if name.endswith("proof") or f"import {name}".startswith(beside)]


def test_an_edit_of_any_file_that_counts_is_another_digest(as_a_tree, of):
    """Of the engine, of the tables that decide, of the shipped rules and pins; the part is named."""
    before = of(as_a_tree)
    names = [(name, Path(file)) for name, file in own_files()]
    assert {"_engine/chains.py", "_releases/known_files.json", "version_matrix.yaml"} <= {name for name, _ in names}
    assert {"_workers/run/sitecustomize.py", "patches/_arguments.py", "_api.py", "ops/rope.py"} <= dict(names).keys()
    for name, file in names[:: times(5, 1)]:
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        room = name.partition("/")[0] if "/" in name else "shim"
        assert differing_parts(before, of(as_a_tree)) == [room], name
        file.write_bytes(content)
    assert of(as_a_tree) == before


def test_files_that_come_and_go_count(as_a_tree, of):
    """Python loads a compiled module rather than the source beside it; a room that nobody knows counts, too."""
    before = of(as_a_tree)
    for name in ("shim/_engine/transactions.so", "shim/_new/thing.py", "patches/megatron_core/more.pyc"):
        added = as_a_tree / name
        added.parent.mkdir(exist_ok=True)
        added.write_bytes(b"x")
        assert len(differing_parts(before, of(as_a_tree))) == 1, name
        added.unlink()
    shutil.rmtree(as_a_tree / "shim" / "_new")
    gone = as_a_tree / "shim" / "_te" / "lost_names.json"
    content = gone.read_bytes()
    gone.unlink()
    assert differing_parts(before, of(as_a_tree)) == ["_te"]
    gone.write_bytes(content)


def test_what_is_no_code_does_not_count(as_a_tree, of):
    """Python's own byte code, what editors and file systems leave, tests, proofs and the command line."""
    before = of(as_a_tree)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(as_a_tree / "shim" / "_engine")], check=True)
    assert list((as_a_tree / "shim" / "_engine").rglob("*.pyc"))
    for name in (
        "shim/_engine/.binder.py.swp",
        "shim/_engine/transactions.py~",
        "shim/_engine/.nfs0001",
        "shim/notes.txt",
    ):
        (as_a_tree / name).write_text("x")
    proofs = [
        f"patches/megatron_core/{name}" for name in ("rope_thd/proof.py", "rope_thd/proved.json", "_proof_pipelines.py")
    ]
    for name in ("shim/testing/ranks.py", "shim/_tools/cli.py", *proofs):
        path = as_a_tree / name
        path.write_text(path.read_text("utf-8") + "\n", "utf-8")
    assert of(as_a_tree) == before


def test_wheel_tree_and_line_ends_are_the_same(as_a_tree, as_a_wheel, tmp_path, of):
    """Also where git has checked the tree out with the line ends of another system."""
    before = of(as_a_tree)
    assert of(as_a_wheel) == before
    other = tmp_path / "crlf"
    shutil.copytree(as_a_wheel, other, ignore=SKIPPED)
    for _, file in files_below(str(other), (".py", ".yaml", ".json")):
        content = Path(file).read_bytes().replace(b"\r\n", b"\n")
        Path(file).write_bytes(content.replace(b"\n", b"\r\n"))
    assert of(other) == before
    engine = other / "shim" / "_engine"
    engine.rename(other / "elsewhere")  # an install made of links, as some tools lay it out
    engine.symlink_to(other / "elsewhere")
    (other / "elsewhere" / "again").symlink_to(engine)
    assert of(other) == before


def test_a_line_end_that_is_cut_in_two_is_one(tmp_path):
    """Files are read in parts of a MiB."""
    for name, same in (("a.py", True), ("a.so", False)):
        one, other = tmp_path / name, tmp_path / f"b_{name}"
        lines = b"x" * ((1 << 20) - 1) + b"\n" + b"y\n"
        one.write_bytes(lines)
        other.write_bytes(lines.replace(b"\n", b"\r\n"))
        assert (file_digest(one) == file_digest(other)) is same
    (tmp_path / "r.py").write_bytes(b"a\r")
    assert file_digest(tmp_path / "r.py") != file_digest(one)


def test_what_cannot_be_read_is_a_digest_of_its_own(tmp_path):
    """Neither an error nor a hang."""
    os.mkfifo(tmp_path / "pipe.py")
    assert file_digest(tmp_path / "pipe.py").startswith("unreadable")
    assert file_digest(tmp_path / "gone.py").startswith("unreadable")


HELD = """
    import os, sys
    import shim._matrix.load as m
    m.TRUSTED = (*m.TRUSTED, "trainer_patches")
    import shim
    if sys.argv[1] == "pin":
        from shim._planning.lock import write_lock
        write_lock("shim.lock", shim.plan(matrix="matrix.yaml"))
    else:
        shim.apply(matrix="matrix.yaml", lock="shim.lock")
"""


def test_an_engine_that_binds_nothing_does_not_pass_a_lock(world, as_a_tree):
    """The lock was written by the shim that was tested; here its binder is another."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    megatron(world.site, "0.16.0", {"roll.py": BROKEN})
    (world.root / "held.py").write_text("\n".join(line[4:] for line in HELD.splitlines()))
    path = os.pathsep.join(map(str, (as_a_tree, world.site, world.own)))

    def run(what):
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "held.py", what]
        return subprocess.run(command, cwd=world.root, env=environ, capture_output=True, text=True)

    assert run("pin").returncode == 0, run("pin").stderr
    (world.root / "shim.lock").chmod(0o644)
    assert run("apply").returncode == 0, run("apply").stderr
    binder = as_a_tree / "shim" / "_engine" / "transactions.py"
    before = binder.read_text("utf-8")
    assert "    def commit(" in before
    binder.write_text(before.replace("    def commit(", "    def commit_not(", 1), "utf-8")
    try:
        done = run("apply")
    finally:
        binder.write_text(before, "utf-8")
    version = json.loads((world.root / "shim.lock").read_text())["releases"]["megatron-shim"]
    assert done.returncode == 1
    assert (
        f"shim's own code differs (_engine): that of megatron-shim {version} in the lock, other code of megatron-shim "
        f"{version} here"
    ) in done.stderr
