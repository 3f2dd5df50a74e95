"""A batch that shim.ops packs trains, on a real model with multi-token prediction, as each sequence does alone."""

import pytest
from packing_cases import alignment_of, row_of, worst_of

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.16.0": "all"}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

ID = "mtp-packed-sequences"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
if not shim.plan()[ID].wanted:
    pytest.skip("these sources need no patch: see test_mtp_packed_sequences_upstream", allow_module_level=True)
WITHIN_LAYOUT = 1e-6
LENGTHS, WIDTH = (5, 9, 0, 3, 12), 12
stock_packs = pytest.mark.skipif(VERSION < (0, 16), reason="stock refuses packed rows before 0.16")


@pytest.mark.parametrize("attend_padding", [False, True])
@pytest.mark.parametrize("sequence_alignment", [None, 4], ids=["row", "sequences"])
@pytest.mark.parametrize(("recipe", "total"), [("delayed", 32), ("blockwise", 128)])
def test_packed_equals_alone(recipe, total, sequence_alignment, attend_padding):
    layout = Layout()
    options = {"sequence_alignment": sequence_alignment, "attend_padding": attend_padding}
    row, packing, _ = row_of(LENGTHS, WIDTH, alignment=alignment_of(recipe, layout), **options)
    assert packing.total == (total if sequence_alignment is None or total == 128 else 48)
    with shim.patched(only=[ID], require=[ID]), testing.layout_initialised(layout):
        assert worst_of(testing.build_gpt(), row) <= WITHIN_LAYOUT


@stock_packs
def test_stock_is_wrong_where_sequences_are_padded():
    row, _, _ = row_of(LENGTHS, WIDTH, alignment=16, sequence_alignment=4)
    with testing.layout_initialised(Layout()):
        assert worst_of(testing.build_gpt(), row) > 1e-2


@stock_packs
@pytest.mark.parametrize(
    "options", [{}, {"sequence_alignment": 4, "attend_padding": True}], ids=["at the end", "counted as tokens"]
)
def test_stock_is_right_where_padding_is(options):
    row, _, _ = row_of(LENGTHS, WIDTH, alignment=16, **options)
    with testing.layout_initialised(Layout()):
        assert worst_of(testing.build_gpt(), row) <= WITHIN_LAYOUT


def on_rank(layout, recipes):
    """The length of the row for each recipe, and the largest difference from alone."""
    with testing.megatron_on_cpu(), shim.patched(only=[ID], require=[ID]), testing.layout_initialised(layout):
        model = testing.build_gpt(sequence_parallel=layout.sequence_parallel)
        rows = [row_of(LENGTHS, WIDTH, alignment=alignment_of(recipe, layout))[0] for recipe in recipes]
        return [row.total for row in rows], max(worst_of(model, row) for row in rows)


@pytest.mark.parametrize(("parallel", "lengths"), [(False, [32, 128]), (True, [32, 256])])
def test_packed_equals_alone_under_tensor_parallelism(ranks2, parallel, lengths):
    for found in ranks2.run(on_rank, Layout(tp=2, sequence_parallel=parallel), ["delayed", "blockwise"]):
        assert found[0] == lengths and found[1] <= WITHIN_LAYOUT
