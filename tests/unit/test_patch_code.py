"""The code of a patch from outside of shim: what it imports, however it is spelt, and all files of named packages."""

import os
import re
import sys
import zipfile
from textwrap import dedent

import pytest
from unit_helpers import BROKEN, write_file
from unit_helpers import PATCH as SOURCE

from shim._matrix.load import load_matrix
from shim._planning.digest import Code, code_of_package
from shim._planning.lock import differences, locked
from shim._planning.options import resolve
from shim._planning.plan import make_plan
from shim._releases.detect import detect

PATCH = "trainer_patches/roll_fix.py"
INIT = "trainer_patches/__init__.py"
HELPER = "trainer_patches/helper.py"
BETWEEN = "trainer_patches/deep/__init__.py"
FAR = "trainer_patches/deep/far.py"
SIBLING = "trainer_helpers/tools.py"

# What a spelling is called -> files, and the helper that an edit of must not go unseen.
SPELLINGS = {
    "import": ({PATCH: "import trainer_patches.helper"}, HELPER),
    "import as": ({PATCH: "import os, trainer_patches.helper as h"}, HELPER),
    "from package": ({PATCH: "from trainer_patches import helper"}, HELPER),
    "from module": ({PATCH: "from trainer_patches.helper import f"}, HELPER),
    "from dot": ({PATCH: "from . import helper"}, HELPER),
    "from dot module": ({PATCH: "from .helper import f"}, HELPER),
    "star": ({PATCH: "from .helper import *"}, HELPER),
    "star of a package": (
        {PATCH: "from .deep import *", BETWEEN: "__all__ = ['far']", FAR: ""},
        FAR,
    ),
    "star of a package with a computed list": (
        {PATCH: "from .deep import *", BETWEEN: "__all__ = ['f' + 'ar']", FAR: ""},
        FAR,
    ),
    "in brackets": ({PATCH: "from trainer_patches import (  # a comment (with brackets)\n    helper,\n)"}, HELPER),
    "over lines": ({PATCH: "from \\\n    .helper \\\n    import f"}, HELPER),
    "behind a semicolon": ({PATCH: "import os; from . import helper"}, HELPER),
    "in a line with if": ({PATCH: "if True: from . import helper"}, HELPER),
    "in a line with try": ({PATCH: "try: import trainer_patches.helper\nexcept ImportError: pass"}, HELPER),
    "in a function": ({PATCH: "def f():\n    from .helper import g\n    return g"}, HELPER),
    "in a lambda": ({PATCH: "f = lambda: __import__('trainer_patches.helper')"}, HELPER),
    "import_module": ({PATCH: "import importlib as i\nh = i.import_module('trainer_patches.helper')"}, HELPER),
    "import_module, relative": (
        {PATCH: "from importlib import import_module as im\nh = im('.helper', __package__)"},
        HELPER,
    ),
    "__import__": ({PATCH: "h = __import__('trainer_patches.helper', fromlist=['f'])"}, HELPER),
    "a table of names": ({PATCH: "LAZY = {'f': 'trainer_patches.helper'}"}, HELPER),
    "in the package's own file": ({PATCH: "", INIT: "from .helper import f"}, HELPER),
    "in the package's own file, from dot": ({PATCH: "", INIT: "from . import helper"}, HELPER),
    "the package's own file": ({PATCH: "", INIT: "X = 1"}, INIT),
    "out of a package below": (
        {PATCH: "from . import deep", BETWEEN: "from .. import helper"},
        HELPER,
    ),
    "a package below": ({PATCH: "from .deep.far import f", FAR: ""}, FAR),
    "the file of a package between": ({PATCH: "from .deep.far import f", FAR: "", BETWEEN: ""}, BETWEEN),
    "by way of another": ({PATCH: "from .a import f", "trainer_patches/a.py": "if 1: from . import helper"}, HELPER),
    "a sibling package": ({PATCH: "if True: from trainer_helpers import tools", SIBLING: ""}, SIBLING),
    "line ends of another system": ({PATCH: "import os\r\nfrom . import helper\r\n"}, HELPER),
    "indented by a form feed": ({PATCH: "\f\nfrom . import helper"}, HELPER),
    "another encoding": ({PATCH: "# -*- coding: latin-1 -*-\nX = '\xe9'; from . import helper"}, HELPER),
}  # fmt: skip


def put(world, files):
    for name in (HELPER, *files):
        text = files.get(name, "")
        file = world.own / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("latin-1" if "latin-1" in text else "utf-8"))


def edited(file):
    file.write_bytes(file.read_bytes() + b"\n# changed\n")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_helper_is_seen_however_it_is_imported(world, spelling):
    """In the code of the patch itself, without the packages that hold it whole; and in the digest of the plan."""
    files, helper = SPELLINGS[spelling]
    put(world, files)
    world.install(BROKEN)
    code = Code(["trainer_helpers"]).of("trainer_patches.roll_fix")
    digest = world.plan(packages=["trainer_patches", "trainer_helpers"]).digest
    edited(world.own / helper)
    assert Code(["trainer_helpers"]).of("trainer_patches.roll_fix") != code
    assert world.plan(packages=["trainer_patches", "trainer_helpers"]).digest != digest


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nh = importlib.import_module('trainer_' + 'patches.hel' + 'per')",
        "import runpy\nh = runpy.run_path(__file__.replace('roll_fix', 'helper'))",
        "exec(open(__file__.replace('roll_fix', 'helper')).read())",
        "import json\nTABLE = json.load(open(__file__.replace('roll_fix.py', 'table.json')))",
    ],
)
def test_all_files_of_a_named_package_count(world, text):
    """What a patch reads by a name that it computes, whatever it is."""
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
    before = [code_of_package(name) for name in names] + [Code().of("spread.a"), Code().of("zipped.a")]
    edited(two / "spread/b.py")
    edited(one / "single.py")
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("zipped/c.py", "")
    after = [code_of_package(name) for name in names] + [Code().of("spread.a"), Code().of("zipped.a")]
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


def test_code_that_patches_share_is_told_apart_from_their_own(world):
    """A helper of many patches is one line, and not one for each. What is edited in a lock is seen in any case."""
    world.install(BROKEN)
    helper = write_file(world.own / HELPER, "X = 1")
    write_file(world.own / PATCH, "from trainer_patches import helper\n" + dedent(SOURCE))
    lock = locked(world.plan())
    assert lock["patches"]["roll-fix"]["own"] == lock["patches"]["faster-forward"]["own"]  # one module
    helper.write_text("X = 2")
    assert differences(lock, locked(world.plan())) == ["code that patches share: 2 in the lock, others here"]
    write_file(world.own / PATCH, "from trainer_patches import helper  # why\n" + dedent(SOURCE))
    first, second = differences(lock, locked(world.plan()))
    assert re.fullmatch(r"faster-forward: code: [0-9a-f]{16} in the lock, [0-9a-f]{16} here", first)
    assert second.startswith("roll-fix: code: ")
    for part in ("own", "code"):
        lock = locked(world.plan())
        lock["patches"]["roll-fix"] |= {part: "0" * 16}
        assert len(differences(lock, locked(world.plan()))) == 1
