"""Which cells of `make test` run a file of tests, and with which cases. The file itself says it, in a line CELLS:

    CELLS = {"0.16.1": "all"}  # every case, on one release
    CELLS = {"0.16.1": "all", "0.12.0": ["test_stock_raises"]}  # on another the first case of what only it can show
    CELLS = "every"  # every case on every cell

That each variant of a patch is right is shown by its proofs, see proof_cases.py.
Only with SHIM_TEST_ONCE_PER_VARIANT=1; without it, as under `make matrix`, everything runs everywhere.
"""

import ast
import functools
import gc
import os
import re
from pathlib import Path

from shim._matrix.cells import with_bodies_of
from shim._matrix.load import load_matrix

TESTS = Path(__file__).parent.parent
ONCE = os.environ.get("SHIM_TEST_ONCE_PER_VARIANT") == "1"


@functools.cache
def matrix_of_today():
    return load_matrix()


SAID = re.compile(r"^(CELLS|ABOUT) = (.*?)(?=^[^\s}\])]|\Z)", re.MULTILINE | re.DOTALL)


@functools.cache
def said_by(path):
    """The constants CELLS and ABOUT of a file of tests, as far as it has them. Nothing is imported."""
    said = {}
    for name, text in SAID.findall(Path(path).read_text("utf-8")):
        said[name] = ast.literal_eval(text)
    return said


def patches_of(path):
    """The ids of the patches that a file of tests is about, by its ABOUT, else by its name; [] if it is about none."""
    if "ABOUT" in said_by(path):
        return said_by(path)["ABOUT"]
    name = path.stem.removeprefix("test_").replace("_", "-")
    named = [id for id in matrix_of_today().patches if name == id or name.startswith(f"{id}-")]
    return [max(named, key=len)] if named else []


def cells_of(path, cells):
    """Cell -> "all" or the names of tests, for those of `cells` on which a file runs.

    A release that is no cell any more stands for the newer one that no patch can tell from it.
    """
    said = said_by(path)["CELLS"]
    if said == "every":
        return dict.fromkeys(cells, "all")
    found = {}
    for cell, cases in said.items():
        place = cell
        if cell not in cells and "+" not in cell:
            place = with_bodies_of(matrix_of_today(), "megatron-core", cell, cells)
        if found.get(place) != "all":
            found[place] = cases
    return found


def left_out(path, cell, cells):
    """Whether pytest leaves a file out on this cell; cells that are not among `cells` run everything."""
    is_file_of_tests = path.suffix == ".py" and path.name.startswith("test_")
    return ONCE and is_file_of_tests and cell in cells and cell not in cells_of(path, cells)


def kept(items, cell, cells):
    """Those of `items` that run on this cell: every case, or the first of each test that is named.

    A test that is marked `once` runs on the last cell that has all cases of its file.
    """
    seen, found = set(), []
    for item in items:
        test, asked = (item.path, item.originalname), cells_of(item.path, cells)
        if item.get_closest_marker("once") and cell != [one for one in cells if asked.get(one) == "all"][-1]:
            continue
        here = asked.get(cell, "all")  # a file that is named on the command line runs anywhere
        if here == "all" or (item.originalname in here and test not in seen):
            found.append(item)
        seen.add(test)
    return found


def keep_part(items, config, cell, cells):
    """Under `make test`, what `kept` leaves."""
    if ONCE and cell in cells:
        left = kept(items, cell, cells)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
        items[:] = left


def variants_of(patches, cell):
    """What a cell shows of these patches: (id, variant); the variant is None where nothing is applied."""
    matrix = matrix_of_today()
    core, _, engine = cell.partition("+")
    releases = {"megatron-core": core, "transformer-engine": engine}
    found = set()
    for id in patches:
        distribution = matrix.patches[id].distribution
        pin = matrix.pins[distribution].get(releases[distribution], {}).get(id)
        found.add((id, pin and pin.variant))
    return found


@functools.cache
def cells_showing(patches, cells):
    """Few cells, new ones first, that show every variant of these patches that `cells` show."""
    missing, chosen = set().union(*(variants_of(patches, cell) for cell in cells)), set()
    while missing:
        best = max(reversed(cells), key=lambda cell: len(variants_of(patches, cell) & missing))
        missing -= variants_of(patches, best)
        chosen.add(best)
    return chosen


def keep_what_is_imported():
    """Have the collector leave alone what is there before the first test: each walk through torch takes it 0.2 s."""
    gc.collect()
    gc.freeze()
