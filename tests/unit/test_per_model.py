"""docs/per-model.md speaks of every patch, and of every option, which is global."""

import re

import pytest
from unit_helpers import REPOSITORY

from shim._matrix.load import load_matrix

PAGE = (REPOSITORY / "docs/per-model.md").read_text("utf-8")
PATCHES = load_matrix().patches


def row_of(id):
    (row,) = re.findall(rf"^\| {id} \|.*$", PAGE, re.M)
    return row


@pytest.mark.parametrize("id", PATCHES)
def test_every_patch_has_a_row(id):
    """An option without a field of the config is named among what is global."""
    row = row_of(id)
    last = row.split("|")[-2]
    for option in PATCHES[id].options or {}:
        assert f"`{option}`" in last or (id == "paged-stash" and "options of the same names" in last), option


def test_no_row_is_of_a_patch_that_is_gone():
    table = PAGE.partition("## Inputs of each patch")[2].partition("\n\nIf two")[0]
    assert set(re.findall(r"^\| ([a-z0-9-]+) \|", table, re.M)) - {"patch"} == set(PATCHES)
