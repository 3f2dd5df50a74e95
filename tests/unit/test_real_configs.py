"""Settings of real trainers' configurations, as facts in real_configs.yaml, and the words that they mean."""

import shlex
from pathlib import Path

import pytest
import yaml

from shim._configs.trainer_config import run_of_configs
from shim._matrix.concerns import NO, UNSAID
from shim._matrix.concerns import run_of as run_of_words
from shim._matrix.load import load_matrix
from shim._planning.options import checked_concerns
from shim.maintenance.docs_concerned import file_of

REAL = yaml.safe_load(Path(__file__).with_name("real_configs.yaml").read_text("utf-8"))


def run_of(tmp_path, real):  # its folder is deep enough that no file of another project lies above it
    return run_of_configs([str(file_of(tmp_path, real))], True)


@pytest.mark.parametrize("real", REAL, ids=[real["in"] for real in REAL])
def test_a_real_configuration_is_read_right(tmp_path, real):
    run = run_of(tmp_path, real)
    assert not [note for note in run.notes if "misspelt" in note]
    holding = {word for word, holds in run.facts.items() if holds} - {*UNSAID}
    if real["words"] == "none":
        assert run.words == "a run without megatron" and not holding
        return
    off = {word for word in real["not"].split() if run.facts.get(word) is not False} if "not" in real else set()
    said = {word for word in real.get("open", "").split() if word in run.facts}
    assert (holding, off, said) == ({*real["words"].split()}, set(), set())


@pytest.mark.parametrize("real", REAL, ids=[real["in"] for real in REAL])
def test_concerns_of_its_file_leaves_out_what_the_plan_for_it_says_is_of_no_concern(tmp_path, real):
    run, words = run_of(tmp_path, real), checked_concerns("concerns", file_of(tmp_path, real))
    by_words = run_of_words(words, True)
    patches = load_matrix(pins=False).patches
    no = {id for id, patch in patches.items() if run.concern_of(patch.concerns) == NO}
    left_out = {id for id, patch in patches.items() if by_words.concern_of(patch.concerns) == NO}
    every = {id for id, patch in patches.items() if ("any",) in patch.concerns}
    assert left_out == (no - every if real["words"] == "none" else no)
    assert checked_concerns("concerns", ",".join(words)) == words


def test_there_are_enough_of_them_and_they_are_of_all_trainers():
    trainers = {real["in"].split()[0] for real in REAL}
    assert len(REAL) >= 40 and len(trainers) >= 10
    assert all(shlex.split(real["in"].replace("'", "")) for real in REAL)
