"""Which tests run on which cell of `make test`: those of a patch once per variant, all else on every cell.

Only with SHIM_TEST_ONCE_PER_VARIANT=1; without it, as under `make matrix`, everything runs everywhere.
"""

import ast
import functools
import gc
import os
import re
import zlib
from pathlib import Path

from shim._matrix.cells import cells, with_bodies_of
from shim._matrix.load import load_matrix


@functools.cache
def matrix_of_today():
    return load_matrix()


def newest_like(*releases):
    """Everyday releases with the same bodies: a new release takes the place of one that no patch can tell from it."""
    matrix = matrix_of_today()
    everyday = [cell["megatron-core"] for cell in cells(matrix)]
    return tuple(with_bodies_of(matrix, "megatron-core", release, everyday) for release in releases)


# Of four ranks each; the others differ in what one or two ranks can show.
LAYOUTS = newest_like("0.13.1", "0.15.3", "0.16.1", "0.19.2")
TESTS = Path(__file__).parent.parent
ONCE = os.environ.get("SHIM_TEST_ONCE_PER_VARIANT") == "1"

# Files that fewer cells say all about: examples where stock packs rows with MTP and where it does not, and what layouts
# show alike between the oldest release and the newest.
ONLY = {
    "test_another_copy": {*newest_like("0.19.2")},
    "test_applied_after": {*newest_like("0.16.1", "0.19.2")},
    "test_demo": {*newest_like("0.16.1")},
    "test_forks": {*newest_like("0.19.2")},
    "test_generic_proofs": {*newest_like("0.13.1", "0.19.2")},
    "test_generic_proofs_rounding": {*newest_like("0.13.1", "0.16.1", "0.19.2")},
    "test_grpo_loss": {*newest_like("0.15.3")},
    "test_import_orders": {
        *newest_like("0.12.0", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
    },
    "test_model_facts": {*newest_like("0.12.0", "0.15.3", "0.19.2")},
    "test_mtp_pipeline_and_models": {*newest_like("0.13.1", "0.19.2")},
    "test_other_trainers": {*newest_like("0.15.3", "0.19.2")},
    "test_other_trainers_ranks": {*newest_like("0.19.2")},
    "test_others_wrappers": {*newest_like("0.15.3", "0.18.2")},
    "test_rope_fusion_tried": {*newest_like("0.12.0", "0.18.2", "0.19.2")},
    "test_te_wrappers": {"0.12.3+2.1.0", "0.18.2+2.16.1"},
    "test_trainings": {*newest_like("0.15.3", "0.19.2")},
    "test_tutorial": {*newest_like("0.16.1")},
    "test_wide_types": {*newest_like("0.12.0", "0.14.0", "0.16.1", "0.19.2")},
}
# Files about no patch of their own, but about the engine, all patches, or the harness.
EVERYWHERE = {
    "test_alignment",
    "test_all_patches",
    "test_another_copy",
    "test_device",
    "test_factories",
    "test_generic_proofs_rounding",
    "test_harness",
    "test_hidden_contracts",
    "test_pickled_by_value",
    "test_import_orders",
    "test_later_parameters",
    "test_model_facts",
    "test_others_hooks",
    "test_others_wrappers",
    "test_proofs",
    "test_relied",
    "test_targets_in_subclasses",
    "test_te_wrappers",
    "test_trainings",
    "test_wide_types",
}
# Of these, each cell runs one case of so many. To ask what patches cost in every step on every release took a fifth of
# all the time.
SHARED = {"test_device": 4, "test_others_wrappers": 2}


@functools.cache
def said_by_files():
    """Stem -> the patches that a file of tests is about by its ABOUT. Without one, the name of the file says it."""
    files = [file for place in ("cells", "pairs") for file in (TESTS / place).rglob("test_*.py")]
    found = {file.stem: re.search(r"(?m)^ABOUT = (\[[^]]*\])", file.read_text("utf-8")) for file in files}
    return {stem: ast.literal_eval(match[1]) for stem, match in found.items() if match}


@functools.cache
def patches_of(stem):
    """The ids of the patches that a file of tests is about; none where it is about all of them."""
    if stem in said_by_files():
        return said_by_files()[stem]
    name = stem.removeprefix("test_").replace("_", "-")
    named = [id for id in matrix_of_today().patches if name == id or name.startswith(f"{id}-")]
    return [max(named, key=len)] if named else []


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


@functools.cache
def cells_for(stem, cells):
    """Those of `cells` on which a file of tests runs."""
    if stem in ONLY:
        return ONLY[stem]
    patches = patches_of(stem)
    return cells_showing(tuple(patches), tuple(cells)) if patches else set(cells)


def left_out(path, cell, cells):
    """Whether pytest leaves this file out on this cell; cells that are not among `cells` run everything."""
    return ONCE and path.suffix == ".py" and cell in cells and cell not in cells_for(path.stem, cells)


def keep_newest(items, config, cell, cells):
    """Tests that are marked `newest` run on the last of `cells` alone."""
    if ONCE and cell in cells and cell != cells[-1]:
        dropped = [item for item in items if item.get_closest_marker("newest")]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def thinned(items, cell, cells):
    """Those of `items` that run on this cell. A file of a patch that runs on several cells shares its cases among them.

    Every test function runs on each of these cells, with every third of its cases, or with every fifth or sixth where
    they are many, but all run somewhere: the next cell has the next ones. A test of layouts runs on the newest release
    and on one of the others, which its name chooses.
    """
    functions = {}
    for item in items:
        functions.setdefault((item.path, item.originalname), []).append(item)
    kept = set()
    for (path, name), cases in functions.items():
        in_layouts = path.parent.name == "layouts"
        places = LAYOUTS if in_layouts else cells
        sharing = [place for place in places if place in cells_for(path.stem, places)]
        if in_layouts and len(sharing) > 2:
            sharing = [sharing[zlib.crc32(name.encode()) % (len(sharing) - 1)], sharing[-1]]
        if cell not in sharing:
            continue
        most = 6 if len(cases) > 11 else 5 if len(cases) > 5 else 3
        step = SHARED.get(path.stem, 1) if path.stem in EVERYWHERE else min(len(sharing), most)
        if cases[0].get_closest_marker("newest"):  # they run nowhere else
            step = 1
        kept.update(cases[sharing.index(cell) % min(step, len(cases)) :: step])
    return [item for item in items if item in kept]


def half(cases, cell):
    """Under `make test` every second of the cases that a test loops over; the newest cell has the first."""
    return cases[cell != LAYOUTS[-1] :: 2] if ONCE else cases


def keep_part(items, config, cell, cells):
    """Under `make test`, what `thinned` leaves."""
    if ONCE and cell in cells:
        kept = thinned(items, cell, cells)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def keep_what_is_imported():
    """Have the collector leave alone what is there before the first test: each walk through torch takes it 0.2 s."""
    gc.collect()
    gc.freeze()
