"""What cannot be read is drifted, never out of range: said loudly, and with the remedy for its cause."""

import os
import py_compile
import re
import shutil
import zipfile

import pytest
from unit_helpers import BROKEN, PATCH, megatron, metadata, output_of, write_file

from shim._errors import NotMetError
from shim._planning.requirements import enforce
from shim._releases.detect import detect
from shim._tools.cli import main

ROLL = "megatron/core/roll.py"


def zipped(root, path, **arguments):
    """`root` as a zip with its directories, which an import from it needs up to Python 3.12."""
    with zipfile.ZipFile(path, "w", **arguments) as archive:
        for entry in sorted(root.rglob("*")):
            archive.write(entry, entry.relative_to(root).as_posix() + "/" * entry.is_dir())
    return path


def compiled(root, keep=False):
    for path in sorted(root.rglob("*.py")):
        py_compile.compile(str(path), cfile=f"{path}c", doraise=True)
        if not keep:
            path.unlink()
    return root


@pytest.mark.parametrize("inside", ["", "lib/python"])
@pytest.mark.parametrize("byte_code", [False, True])
def test_a_release_in_a_zip_is_read_as_zipimport_reads_it(world, tmp_path, inside, byte_code):
    """With its metadata, below a directory in it too, and beside byte code, which an import prefers there."""
    root = megatron(tmp_path / "tree" / inside, "0.16.0", {"roll.py": BROKEN})
    metadata(root, "0.16.0")
    if byte_code:
        compiled(root, keep=True)
    archive = zipped(tmp_path / "tree", tmp_path / "m.zip", compression=zipfile.ZIP_DEFLATED)
    world.on_path(archive / inside, world.own)
    core = detect().installed["megatron-core"]
    assert (core.raw, core.problems) == ("0.16.0", ())
    assert core.origin == ("version file" if inside else "distribution metadata")  # importlib looks no deeper
    found = world.plan()
    assert {decision.action for decision in found.decisions.values()} == {"apply"}
    shutil.rmtree(root / "megatron_core-0.16.0.dist-info")
    (tmp_path / "m.zip").unlink()
    world.on_path(zipped(tmp_path / "tree", tmp_path / "bare.zip") / inside, world.own)
    core = detect().installed["megatron-core"]
    assert (core.raw, core.origin, core.problems) == ("0.16.0", "version file", ())


def test_a_release_in_a_zip_is_patched(world, tmp_path):
    """From the plan to the call."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    root = megatron(tmp_path / "tree", "0.16.0", {"roll.py": BROKEN})
    for name in ("megatron/core/__init__.py", "megatron/core/package_info.py"):
        (root / name).write_text("MAJOR = 0\nMINOR = 16\nPATCH = 0\n")
    archive = zipped(root, tmp_path / "m.zip")
    code = f"""
        import shim
        import megatron.core.roll
        assert megatron.core.roll.__file__.startswith({str(archive)!r})
        print(*shim.apply(matrix={str(world.matrix)!r}, packages='trainer_patches').applied)
    """
    assert output_of(code, archive, world.own).split() == ["roll-fix", "faster-forward"]


@pytest.mark.parametrize("stated", [False, True])
def test_byte_code_without_sources_is_drifted(world, tmp_path, stated):
    """With metadata that say the version, and with nothing that does; from a zip alike."""
    root = compiled(megatron(tmp_path / "tree", "0.16.0", {"roll.py": BROKEN}))
    if stated:
        metadata(root, "0.16.0")
    for place in (root, zipped(root, tmp_path / "m.zip")):
        world.on_path(place, world.own)
        found = world.plan()["roll-fix"]
        assert found.action == "drifted"
        assert "roll.pyc is not Python source" in found.reason
        assert found.remedy.startswith("install megatron-core") and "with its sources" in found.remedy


def test_what_cannot_be_read_is_counted(world, tmp_path, caplog, capsys, monkeypatch):
    """By strict, by require, by `plan --strict`, and by one warning that says what stays wrong."""
    text = world.matrix.read_text()
    world.matrix.write_text(text.replace("    summary: rolls", "    without: rolls leave\n    summary: rolls", 1))
    root = compiled(megatron(tmp_path / "tree", "0.16.0", {"roll.py": BROKEN}))
    world.on_path(root, world.own)
    for arguments in ({"strict": True}, {"require": "roll-fix"}, {"on_drift": "error"}):
        with pytest.raises(NotMetError, match=r"roll-fix is drifted.*with its sources"):
            enforce(world.plan(**arguments))
    assert main(["plan", "--strict", "--matrix", str(world.matrix)]) == 1
    assert "strict, and roll-fix is drifted" in capsys.readouterr().err
    code = f"import shim; shim.apply(matrix={str(world.matrix)!r}, packages='trainer_patches')"
    loud = "import logging, sys; logging.basicConfig(format='%(message)s', stream=sys.stdout); "
    done = output_of(loud + code, root, world.own)
    assert "roll-fix is not applied (drifted)" in done and "If this tree needs it: rolls leave. Remedy: install" in done


def test_a_release_that_is_too_old_stays_out_of_range(world, tmp_path):
    """Its version says so, whatever can be read."""
    root = compiled(megatron(tmp_path / "tree", "0.11.0", {"roll.py": BROKEN}))
    metadata(root, "0.11.0")
    world.on_path(root, world.own)
    assert world.plan()["roll-fix"].action == "out-of-range"


SUPPORTED, LATER, VENDOR = "0.16.0", "0.16.9", "0.16.0+nv1"


@pytest.mark.parametrize(
    ("content", "version", "remedy"),
    [
        (b"def roll(:\n", SUPPORTED, "reinstall megatron-core 0.16.0; if the file is not damaged, it needs a newer"),
        (b"def roll(:\n", LATER, "reinstall megatron-core 0.16.9; if the file is not damaged"),
        (b"x = '\xff'\n", SUPPORTED, "reinstall megatron-core 0.16.0; if"),
        (BROKEN.encode()[:60], SUPPORTED, "reinstall megatron-core 0.16.0"),
        (None, SUPPORTED, "let the proofs decide, .*reinstall megatron-core 0.16.0, whose code this is not"),
        (b"x = 1\n", SUPPORTED, "let the proofs decide, .*reinstall megatron-core 0.16.0, whose code this is not"),
        (
            b"x = 1\n",
            LATER,
            r"let the proofs decide, .* install a supported release of megatron-core \(0.16.0 to 0.18",
        ),
        (b"x = 1\n", VENDOR, "let the proofs decide, .*; or install a supported release"),
        (None, LATER, "let the proofs decide, .*; or install a supported release"),
        (None, None, "let the proofs decide, .*; or install a supported release"),
    ],
)
def test_the_remedy_fits_the_cause(world, content, version, remedy):
    """To install a supported release helps nobody who has one, damaged."""
    world.install(BROKEN, version)
    path = world.site / ROLL
    path.unlink() if content is None else path.write_bytes(content)
    found = world.plan()["roll-fix"]
    assert found.action == "drifted"
    assert re.match(remedy, found.remedy), found.remedy


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that root may open and cannot read")
def test_a_file_that_the_system_refuses_to_read(world):
    """The remedy is to be let."""
    path = world.install(BROKEN).site / ROLL
    path.unlink()
    path.symlink_to("/proc/self/mem")
    found = world.plan()["roll-fix"]
    assert found.action == "drifted" and "cannot be read" in found.reason
    assert found.remedy == "let this process read the files of megatron-core 0.16.0"


def test_a_broken_symlink_is_a_missing_file(world):
    """As an import takes it."""
    path = world.install(BROKEN).site / ROLL
    path.unlink()
    path.symlink_to("gone.py")
    found = world.plan()["roll-fix"]
    assert found.action == "drifted" and "no module megatron.core.roll" in found.reason


def test_a_package_without_its_init_file_is_installed_all_the_same(world):
    """An import takes it as a namespace; a directory that only has its name is nothing."""
    world.install(BROKEN)
    (world.site / "megatron/core/__init__.py").unlink()
    assert world.plan()["roll-fix"].action == "apply"
    (world.site / "megatron/core/package_info.py").unlink()
    assert world.plan()["roll-fix"].action == "not-installed"


def test_of_two_trees_the_first_is_read_and_the_other_is_named(world, tmp_path):
    """Whole or not: what an import would take decides."""
    part = megatron(tmp_path / "part", "0.16.0")
    world.install(BROKEN)
    world.on_path(part, world.site, world.own)
    found = world.plan()
    assert found["roll-fix"].action == "drifted" and "no module" in found["roll-fix"].reason
    assert [str(world.site) in problem for problem in detect().installed["megatron-core"].problems] == [True]


def test_a_damaged_zip_is_no_installation(world, tmp_path):
    """An import fails just so, and nothing else does."""
    root = megatron(tmp_path / "tree", "0.16.0", {"roll.py": BROKEN})
    archive = zipped(root, tmp_path / "m.zip")
    archive.write_bytes(archive.read_bytes()[:-40])
    world.on_path(archive, world.own)
    assert "megatron-core" not in detect().installed
    assert world.plan()["roll-fix"].action == "not-installed"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_is_drifted(world, tmp_path, method):
    """The others are read; zipimport itself, which compiles what it locates, raises a SyntaxError or zlib.error."""
    root = megatron(tmp_path / "tree", "0.16.0", {"roll.py": BROKEN})
    archive = zipped(root, tmp_path / "m.zip", compression=method)
    content = archive.read_bytes()
    where = content.index(b"roll.py") + len(b"roll.py")  # where its content begins
    archive.write_bytes(content[:where] + b"\xfe\xfe\xfe" + content[where + 3 :])
    world.on_path(archive, world.own)
    found = world.plan()["roll-fix"]
    assert found.action == "drifted" and found.remedy.startswith("reinstall"), found


# Which variant is meant


def test_the_nearest_variant_is_told_where_the_version_misleads(world):
    """0.17 by its version, and by three of four bodies 0.16."""
    edited = BROKEN.replace("return roll(x)", "return roll(x, 1)")
    found = world.install(edited, "0.17.0").plan()["roll-fix"]
    assert (found.action, found.variant) == ("drifted", "old")
    assert "Layer.forward: its body is not that of any" in found.reason and "more" not in found.reason


def test_a_body_that_is_known_elsewhere_says_where(world):
    """Rather than that nobody knows it."""
    found = world.install(BROKEN.replace("return roll(x)", "return roll(x, dims=0)"), "0.16.0").plan()["roll-fix"]
    assert "its body is that of megatron-core 0.18.0, which needs no patch" in found.reason


def test_another_distribution_of_unknown_version_rules_nothing_out(world):
    """Its rule may hold; one whose version is known must."""
    text = world.matrix.read_text()
    text = text.replace('<0.17.0.dev0", variant: old}', '<0.17.0.dev0", transformer-engine: ">=2.dev0", variant: old}')
    text = text.replace('<0.18.0.dev0", variant: new}', '<0.18.0.dev0", transformer-engine: ">=2.dev0", variant: new}')
    world.matrix.write_text(text.replace('<0.19.0.dev0", note', '<0.19.0.dev0", transformer-engine: ">=2.dev0", note'))
    write_file(world.own / "transformer_engine/__init__.py", "")
    for version in ("0.16.0", "0.99.0", None):
        found = world.install(BROKEN, version)
        assert planned(world)["roll-fix"].action == "apply"
    write_file(world.own / "build_tools/VERSION.txt", "1.0\n")
    for version in ("0.16.0", "0.99.0", None):
        found = world.install(BROKEN, version)
        assert planned(found)["roll-fix"].action == "out-of-range"


def planned(world):
    from shim._matrix.load import load_matrix
    from shim._planning.options import resolve
    from shim._planning.plan import make_plan

    matrix = load_matrix(world.matrix, check_ranges=False)
    return make_plan(detect(), matrix, resolve(matrix))
