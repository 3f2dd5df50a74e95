"""mamba-packed-sequences: a row without numbers of sequences gets those that `total_tokens` would give it."""

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core._proof_mamba import mamba_on_cpu
from shim.patches.megatron_core.mamba_packed_sequences.proof import HIDDEN, LENGTHS, mixer, row

CELLS = {"0.19.2": "all"}

ID = "mamba-packed-sequences"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


def numbers(packed):
    """Of the sequences of a row's tokens that the mixer gives to the scan; and whether the row was changed."""
    with mamba_on_cpu():
        layer = mixer()
        module = __import__(type(layer).__module__, fromlist=["_"])
        scan, seen = module.mamba_split_conv1d_scan_combined, []

        def watched(*args, **options):
            seen.append(options["seq_idx"])
            return scan(*args, **options)

        module.mamba_split_conv1d_scan_combined = watched
        before = packed.seq_idx
        layer(torch.zeros(sum(LENGTHS) + 3, 1, HIDDEN), packed_seq_params=packed)
        assert packed.seq_idx is before
    return seen[0]


@pytest.mark.parametrize("padding", [0, 3])
def test_numbers_are_those_of_a_row_with_its_tokens(padding):
    """padding: behind the last sequence, as a part of it; or three tokens behind all sequences."""
    with shim.patched(only=[ID], require=[ID]):
        found = numbers(row(padding).packed_seq_params())
    right = row(padding).packed_seq_params(total_tokens=sum(LENGTHS) + 3).seq_idx
    assert torch.equal(found, right)
    assert found.dtype == right.dtype


def test_a_row_that_brings_numbers_keeps_them():
    packed = row(3).packed_seq_params(total_tokens=sum(LENGTHS) + 3)
    with shim.patched(only=[ID], require=[ID]):
        assert numbers(packed) is packed.seq_idx


def test_a_row_without_offsets_is_one_sequence():
    """As of a batch that brings its own context-parallel group alone."""
    packed = type(row().packed_seq_params())(qkv_format="sbhd")
    with shim.patched(only=[ID], require=[ID]):
        assert numbers(packed) is None
