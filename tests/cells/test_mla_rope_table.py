"""mla-rope-table: under context parallelism fused MLA gets the part of the table that is its own."""

import pytest
import torch
from rope_cases import Group

import shim
from shim import testing

ID = "mla-rope-table"
if tuple(int(part) for part in testing.release().split(".")[:2]) < (0, 13):
    pytest.skip("fused MLA came with 0.13", allow_module_level=True)


def mla_tables(rank):
    """For each of some lengths, whether fused MLA is given the table of the unfused path."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    yarn = YarnRotaryEmbedding(8, original_max_position_embeddings=32)
    yarn.cp_group = Group(2, rank)  # 0.13 gives it to the wrong parameter
    for length in (48, 16, 64, 8, 16):
        cos, sin = yarn.get_cached_cos_sin(length, dtype=torch.float32)
        freqs, mscale = yarn(length)
        yield torch.equal(cos, freqs.cos() * mscale) and torch.equal(sin, freqs.sin() * mscale)


@pytest.mark.parametrize("rank", [0, 1])
def test_stock_gives_fused_mla_a_part_of_a_longer_table(rank):
    """Right only where the sequence is the longest so far."""
    assert list(mla_tables(rank)) == [True, False, True, False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_table_of_fused_mla_is_that_of_its_own_length(rank):
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        assert list(mla_tables(rank)) == [True] * 5
