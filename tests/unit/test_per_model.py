"""The table of docs/per-model.md speaks of every patch, and of every option, which is global."""

import re

import pytest

from shim._matrix.load import load_matrix
from shim.maintenance.docs import per_model_table

TABLE = per_model_table(load_matrix())
PATCHES = load_matrix().patches


def row_of(id):
    (row,) = re.findall(rf"^\| {id} \|.*$", TABLE, re.M)
    return row


@pytest.mark.parametrize("id", PATCHES)
def test_every_patch_has_a_row(id):
    """An option without a field of the config is named among what is global."""
    row = row_of(id)
    last = row.split("|")[-2]
    for option in PATCHES[id].options or {}:
        assert f"`{option}`" in last or (id == "paged-stash" and "options of the same names" in last), option
