"""Trainers without the lines that docs/trainers.yaml says can go train right with shim, and do not without."""

import os
import shutil
from functools import cache

import pytest
from trainers import VERSIONS, directories, run
from unit_helpers import REPOSITORY

from shim.maintenance.docs_trainers import edited, read_trainers
from shim.testing.releases import fetch

RELEASES = {"0.17.1": "2.14.1", "0.18.2": "2.16.1"}
WITHIN = 1e-6
TRAINERS = {trainer.name: trainer for trainer in read_trainers(REPOSITORY / "docs/trainers.yaml")}

each_release = pytest.mark.parametrize("release", RELEASES)


def telling(name, tell, there):
    """A function of a release and variables: what `tell` says of an edited copy of the trainer, made below `there`."""
    trainer = TRAINERS[name]
    shutil.copytree(fetch(VERSIONS[name], name) / trainer.folder, there / trainer.folder)
    for file in {edit.file for edit in trainer.edits}:
        path = there / trainer.folder / file
        path.write_text(edited(path.read_text("utf-8"), [edit for edit in trainer.edits if edit.file == file]), "utf-8")

    @cache
    def told(release, **variables):
        te = RELEASES[release]
        path = os.pathsep.join(map(str, [there, *directories([name], release, te)]))
        answer = run(tell, trainers=[name], core=release, te=te, PYTHONPATH=path, **variables)
        assert answer["of"].startswith(str(there))
        return answer

    return told


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return telling("mcore-bridge", "edits_story:tell", tmp_path_factory.mktemp("mcore-bridge"))


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    return telling("verl", "verl_story:tell_edited", tmp_path_factory.mktemp("verl"))


@each_release
def test_packed_equals_alone(story, release):
    """Rows with and without padding, all weights or LoRA alone."""
    packed = story(release)["packed"]
    assert len(packed) == 4
    assert all(error <= WITHIN for error in packed.values()), packed


@each_release
def test_recompute_equals_none(story, release):
    """To the bit, MTP layers included under every method: the deleted copy left them out of block, and refused two."""
    again = {"uniform": 3, "block": 2, "uniform by two": 3}
    assert story(release)["recompute"] == {
        f"{weights}, {method}": [0.0, calls] for weights in ("whole", "LoRA") for method, calls in again.items()
    }


@each_release
def test_the_moved_name_is_there(story, release):
    assert story(release)["SplitAlongDim"]


@each_release
def test_without_shim_the_lines_are_missed(story, release):
    """Else nothing above would show that shim takes their place."""
    told = story(release, MEGATRON_SHIM_DISABLE="1")
    assert told["packed"]["whole, padded"] > 1e-2
    assert "TypeError" in told["recompute"]["whole, uniform"]
    assert not told["SplitAlongDim"]


@each_release
def test_what_took_the_place_of_lines_is_applied(story, release):
    """The patches of the rows that are edited."""
    trainer = TRAINERS["mcore-bridge"]
    lines = {(edit.file, line) for edit in trainer.edits for line in range(edit.first, edit.last + 1)}
    gone = [
        item for item in trainer.items if item.verdict == "unnecessary" and _lines(item.at) & lines == _lines(item.at)
    ]
    wanted = {patch for item in gone for patch in item.patches}
    assert wanted == {"mtp-recompute", "te-moved-symbols", "rope-thd", "expert-bias-padding"}
    states = story(release)["states"]
    assert {patch: states[patch] for patch in wanted} == dict.fromkeys(wanted, "applied")


@each_release
def test_verl_trains_right(verl, release):
    """Plain and padded rows, with recompute and without, all weights, adapters, and verl's detached MTP."""
    told = verl(release)
    assert len(told["error"]) == 18 and all(error <= WITHIN for error in told["error"].values()), told["error"]
    assert len(told["same"]) == 12 and all(same is True for same in told["same"].values()), told["same"]


@each_release
def test_verl_frees_no_input_of_an_mtp_layer(verl, release):
    """Its copy hides the layer from its own backward, which then frees what the layer reads again."""
    assert verl(release)["freed"] == {"mtp": 0, "decoder": 2}


@each_release
def test_verl_is_told_that_all_is_applied(verl, release):
    checked = verl(release)["checked"]
    assert checked["raised"] is None
    assert {checked["states"][patch][0] for patch in ("mtp-recompute", "mtp-packed-sequences")} == {"applied"}


@each_release
def test_verl_misses_the_lines_without_shim(verl, release):
    told = verl(release, MEGATRON_SHIM_DISABLE="1")["error"]
    assert told["whole padded none"] > 1e-2
    assert "Error" in str(told["whole plain uniform"])


@pytest.mark.parametrize("name", sorted(VERSIONS.keys() & TRAINERS.keys()))
def test_places_are_where_the_page_says(name):
    """What an item is named after stands in its lines, and every other place is in its file."""
    trainer = TRAINERS[name]
    assert trainer.version == VERSIONS[name]
    top = fetch(VERSIONS[name], name) / trainer.folder
    for item in trainer.items:
        file, text = item.at.rpartition(":")[0], (top / item.at.rpartition(":")[0]).read_text("utf-8").splitlines()
        found = "\n".join(text[line - 1] for _, line in sorted(_lines(item.at)))
        assert all(name.rpartition(".")[2] in found for name in item.name.split(", ")), (file, item.at)
    for place in (place for places in trainer.own.values() for place in places):
        assert max(line for _, line in _lines(place)) <= len((top / place.rpartition(":")[0]).read_bytes().splitlines())


def _lines(place):
    file, _, lines = place.rpartition(":")
    first, _, last = lines.partition("-")
    return {(file, line) for line in range(int(first), int(last or first) + 1)}
