"""Files of real releases that are known as a whole are not parsed, and what is said of them is what is in them."""

import ast
import json
import shutil
import subprocess
import sys

import pytest

from shim._errors import SourceError
from shim._matrix.load import load_matrix
from shim._releases.fingerprint import fingerprint, split_target
from shim._releases.known_files import known_files, known_value, measure_files
from shim._releases.sources import Sources
from shim.maintenance.tables import render_files
from shim.testing.patience import patience
from shim.testing.releases import environment, fetch

RELEASES = [("megatron-core", "0.12.0"), ("megatron-core", "0.19.2"), ("transformer-engine", "2.20.2")]
MATRIX = load_matrix()
# A new patch may name bodies that the table lacks until `make pins` before a release; their files are parsed.
NAMES = {f"{m}:{name}" for m, files in known_files().items() for bodies in files.values() for name in bodies}
BODIES = sorted({body for entry in MATRIX.patches.values() for body in entry.bodies} & NAMES)
LACKING = {split_target(body)[0] for entry in MATRIX.patches.values() for body in {*entry.bodies} - NAMES}
PLAN = """
import json, shim
from shim._releases import known_files
from shim._releases.sources import Sources
parsed, parse = [], Sources._parse
Sources._parse = lambda self, module: parsed.append(module) or parse(self, module)
plan = shim.plan()
read = [table for table in ("known_files", "known_trees") if getattr(known_files, table).cache_info().misses]
print(json.dumps([parsed, plan.to_dict()["patches"], read]))
"""


def value(sources, target, added):
    try:
        return fingerprint(sources, target, may_be_missing=added)
    except SourceError as error:
        return str(error), error.cause


@pytest.mark.parametrize(("distribution", "release"), RELEASES, ids=[release for _, release in RELEASES])
def test_the_table_is_what_parsing_finds(distribution, release):
    root = fetch(release, distribution)
    read, known, table = Sources([root]), Sources([root], known=known_value), {}
    measure_files(read, BODIES, table)
    for module, digests in table.items():
        for digest, bodies in digests.items():
            said = known_files()[module][digest]
            assert {name: said.get(name) for name in bodies} == bodies, f"{module} of {release}: run make pins"
    for target in BODIES:
        for added in (False, True):
            assert value(known, target, added) == value(read, target, added), target
    assert not [tree for tree in known._trees.values() if isinstance(tree, ast.Module)]


def planned(*directories):
    done = subprocess.run(
        [sys.executable, "-c", PLAN], env=environment(directories), capture_output=True, text=True, timeout=patience()
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plan_for_known_releases_parses_nothing():
    core, engine = fetch("0.19.2"), fetch("2.20.2", "transformer-engine")
    parsed, patches, _ = planned(core, engine)
    assert set(parsed) <= LACKING
    assert patches["mtp-packed-sequences"]["action"] == "apply"


@pytest.mark.parametrize(("core", "engine"), [("0.12.3", "2.1.0"), ("0.16.1", "2.12.0"), ("0.19.2", "2.20.2")])
def test_a_plan_for_known_releases_does_not_read_what_is_known_of_other_trees(core, engine):
    """Releases lack what later ones have, and patches for it: nothing is looked up for these, either."""
    assert planned(fetch(core), fetch(engine, "transformer-engine"))[2] == ["known_files"]


def test_a_file_that_was_edited_is_parsed_and_the_edited_body_is_left_out(tmp_path):
    """By one character of one body, which the patch can do without; its other bodies stay known."""
    shutil.copytree(fetch("0.19.2"), tmp_path / "edited", ignore=shutil.ignore_patterns("__pycache__"))
    target = "megatron.core.transformer.multi_token_prediction:process_mtp_loss"
    file = tmp_path / "edited" / (split_target(target)[0].replace(".", "/") + ".py")
    text = file.read_text("utf-8")
    start = text.index("def process_mtp_loss")
    file.write_text(text[:start] + text[start:].replace("return ", "return +", 1), "utf-8")
    parsed, patches, read = planned(tmp_path / "edited")
    assert read == ["known_files", "known_trees"]
    of_patch = {split_target(body)[0] for body in load_matrix().patches["mtp-packed-sequences"].bodies}
    assert split_target(target)[0] in parsed and set(parsed) <= of_patch | LACKING
    found = patches["mtp-packed-sequences"]
    assert (found["action"], list(found["dropped"])) == ("apply", [target])
    assert patches["mtp-recompute"]["action"] == "apply"


def test_the_text_gives_the_table_back():
    assert json.loads(render_files(known_files())) == known_files()
