"""The code of a patch: its folder, and of one from outside of shim all files of the named packages."""

import os
import sys
import zipfile

import pytest
from unit_helpers import BROKEN, write_file

from shim._matrix.load import load_matrix
from shim._planning.digest import code_of_package, code_of_patch
from shim._planning.lock import differences, locked
from shim._planning.options import resolve
from shim._planning.plan import make_plan
from shim._releases.detect import detect

PATCH = "trainer_patches/roll_fix.py"
HELPER = "trainer_patches/helper.py"
SIBLING = "trainer_helpers/tools.py"


def put(world, files):
    for name in (HELPER, *files):
        write_file(world.own / name, files.get(name, ""))


def edited(file):
    file.write_bytes(file.read_bytes() + b"\n# changed\n")


@pytest.mark.parametrize(
    "text",
    [
        "from . import helper",
        "import importlib\nh = importlib.import_module('trainer_' + 'patches.hel' + 'per')",
        "import runpy\nh = runpy.run_path(__file__.replace('roll_fix', 'helper'))",
        "exec(open(__file__.replace('roll_fix', 'helper')).read())",
        "import json\nTABLE = json.load(open(__file__.replace('roll_fix.py', 'table.json')))",
    ],
)
def test_all_files_of_a_named_package_count(world, text):
    """What a patch imports, and what it reads by a name that it computes, whatever it is."""
    deep = "trainer_patches/data.json/notes.d/rows.txt"
    put(world, {PATCH: text, "trainer_patches/table.json": "{}", deep: ""})
    world.install(BROKEN)
    before = world.plan(packages="trainer_patches").digest
    edited(world.own / deep)
    digest = world.plan(packages="trainer_patches").digest
    assert digest != before
    edited(world.own / ("trainer_patches/table.json" if "table" in text else HELPER))
    assert world.plan(packages="trainer_patches").digest != digest


def test_a_named_package_counts_as_soon_as_a_patch_lies_outside_of_shim(world):
    """And what is no part of it does not: Python's byte code, hidden files, and another package."""
    beside = ("trainer_patches/__pycache__/x.pyc", "trainer_patches/.swp", "other/a.py")
    put(world, {PATCH: "", SIBLING: "", **dict.fromkeys(beside, "")})
    world.install(BROKEN)
    named = ["trainer_patches", "trainer_helpers"]
    digest, nothing = world.plan(packages=named).digest, world.plan(packages=named, only=[]).digest
    for name in beside:
        edited(world.own / name)
    assert world.plan(packages=named).digest == digest == world.plan(packages=named[::-1]).digest
    edited(world.own / SIBLING)
    assert world.plan(packages=named).digest != digest
    assert world.plan(packages=named, only=[]).digest == nothing


def test_namespaces_modules_and_zips_can_be_named(tmp_path, on_path):
    """A package without a file of its own in two places, one module, and what Python imports from a zip."""
    one, two, packed = tmp_path / "one", tmp_path / "two", tmp_path / "packed.zip"
    write_file(one / "spread/a.py", "from .b import f\n")
    write_file(two / "spread/b.py", "")
    write_file(one / "single.py", "")
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/a.py", "from . import b\n")
        archive.writestr("zipped/b.py", "")
    on_path(one, two, packed)
    names = ("spread", "single", "zipped")
    before = [code_of_package(name) for name in names]
    edited(two / "spread/b.py")
    edited(one / "single.py")
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("zipped/c.py", "")
    after = [code_of_package(name) for name in names]
    assert not [index for index, pair in enumerate(zip(before, after)) if pair[0] == pair[1]]
    assert len(code_of_package("there_is_none")) == 16


def test_nothing_of_it_is_imported_and_nothing_stops_it(world):
    """A helper that would raise, one that cannot be parsed, a pipe in the package, and a loop of links."""
    text = "from . import helper, broken, latin\n"
    put(world, {PATCH: text, HELPER: "raise RuntimeError\n", "trainer_patches/broken.py": "def (:\n"})
    os.mkfifo(world.own / "trainer_patches/pipe.py")
    (world.own / "trainer_patches/loop").symlink_to(world.own / "trainer_patches")
    world.install(BROKEN)
    digest = world.plan(packages="trainer_patches").digest
    assert not [name for name in sys.modules if name.startswith("trainer_patches")]
    edited(world.own / "trainer_patches/broken.py")
    assert world.plan(packages="trainer_patches").digest != digest


def test_files_of_packages_are_named_by_a_lock_and_a_resume(world):
    """A patch whose own code is the same, beside a table that it reads."""
    from shim._planning.resume import differs, state_of

    put(world, {PATCH: "", "trainer_patches/table.json": "{}"})
    world.install(BROKEN)

    def made():
        matrix = load_matrix(world.matrix)
        return make_plan(detect(), matrix, resolve(matrix, packages=["trainer_patches"]))

    before = made()
    lock, state = locked(before), state_of(before)
    edited(world.own / "trainer_patches/table.json")
    [said] = differences(lock, locked(made()))
    assert said.startswith("files of the package trainer_patches: ") and said.endswith(" here")
    assert differs(state, made()) == "files of trainer_patches differ"


def test_the_code_of_a_patch_is_that_of_its_folder():
    """Of shim's patches without their proofs; what they share with others lies in another room."""
    own = {
        "patches/megatron_core/one/__init__.py": "1",
        "patches/megatron_core/one/steps.py": "2",
        "patches/megatron_core/one_more.py": "3",
        "ops/roll.py": "4",
    }
    one, more = "shim.patches.megatron_core.one", "shim.patches.megatron_core.one_more"
    before = code_of_patch(one, own), code_of_patch(more, own)
    assert before[0] != before[1]
    for name, differs in zip(own, ((True, False), (True, False), (False, True), (False, False))):
        edited_one = {**own, name: "5"}
        now = code_of_patch(one, edited_one), code_of_patch(more, edited_one)
        assert tuple(a != b for a, b in zip(before, now)) == differs, name
