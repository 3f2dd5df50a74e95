"""Patch te-permutation: the sort gives what it gave, Triton keeps its own module, and newer releases are left alone."""

from importlib import import_module

import torch
import triton
from needed import needed
from triton.language import core

import shim
from shim.testing.interpreted import interpreted

CELLS = {"0.15.3+2.9.0": "all"}

ID = "te-permutation"
pytestmark = needed(ID)


def kernels():
    return import_module("transformer_engine.pytorch.triton.permutation")


def row_id_map(routing):
    """By the kernels, in Triton's interpreter, which calls any function."""
    with interpreted(kernels()):
        return kernels().make_row_id_map(routing, *routing.shape)


def used(found, experts):
    """Each token's row numbers and experts, without the places that the kernels leave unwritten."""
    return [(row[: row[-1]].tolist(), row[experts : experts + row[-1]].tolist()) for row in found]


def test_the_rows_are_those_of_stock():
    routing = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = used(row_id_map(routing), 4)
    with shim.patched(only=[ID], require=[ID]):
        found = used(row_id_map(routing), 4)
    assert found == expected
    # Rows are sorted by expert, then by token.
    places = {(e, t): row for row, (e, t) in enumerate(torch.nonzero(routing.T).tolist())}
    for token, (rows, experts) in enumerate(found):
        assert {places[expert, token] for expert in experts} == set(rows)


def test_triton_is_left_alone():
    before = dict(vars(core))
    with shim.patched(only=[ID], require=[ID]):
        assert kernels().core is not core
        assert kernels().core.get_int_dtype(16, signed=True) is triton.language.int16
        assert triton.language.core is core
        assert dict(vars(core)) == before
    assert kernels().core is core
