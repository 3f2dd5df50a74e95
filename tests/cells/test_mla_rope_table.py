"""mla-rope-table: under context parallelism fused MLA gets the part of the table that is its own."""

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core._proof_rotations import Group

CELLS = {"0.15.3": "all"}

ID = "mla-rope-table"
MINOR = tuple(int(part) for part in testing.release().split(".")[:2])
if MINOR < (0, 13):
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


# From 0.20: a call may bring its own group, and the plain embedding has the method too.

takes_group = pytest.mark.skipif(
    shim.plan()[ID].variant != "v0_20", reason="a call brings its own group, and both embeddings a table, from 0.20"
)
LENGTHS = (48, 16, 64, 8, 16)


def tables_with_groups(kind, calls):
    """For each (length, group), whether the table is the one that the unfused path takes for them."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    if kind == "yarn":
        options = {"original_max_position_embeddings": 32, "use_cpu_initialization": True}
        rope = yarn_rotary_pos_embedding.YarnRotaryEmbedding(8, cp_group=Group(2, 1), **options)
    else:
        rope = rotary_pos_embedding.RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=Group(2, 1))
    for length, group in calls:
        cos, sin = rope.get_cached_cos_sin(length, dtype=torch.float32, cp_group=group)
        freqs = rope(length, cp_group=group)
        freqs, mscale = freqs if kind == "yarn" else (freqs, 1.0)
        yield torch.equal(cos, freqs.cos() * mscale) and torch.equal(sin, freqs.sin() * mscale)


@takes_group
@pytest.mark.parametrize("kind", ["yarn", "plain"])
def test_the_table_is_cut_for_the_group_of_the_call(kind):
    own, other = None, Group(4, 3)
    lengths = [(length, own) for length in LENGTHS]
    groups = [(64, own), (64, other), (64, own), (64, Group(1)), (32, other), (64, own)]
    assert not all(tables_with_groups(kind, lengths)) and not all(tables_with_groups(kind, groups))  # stock
    with shim.patched(only=[ID], require=[ID]):
        assert all(tables_with_groups(kind, lengths)) and all(tables_with_groups(kind, groups))


@takes_group
def test_a_table_is_not_computed_again_for_the_same_length_and_group(monkeypatch):
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    with shim.patched(only=[ID], require=[ID]):
        yarn = YarnRotaryEmbedding(8, use_cpu_initialization=True, cp_group=Group(2, 1))
        for _ in range(2):
            first, again = yarn.get_cached_cos_sin(16)[0], yarn.get_cached_cos_sin(16)[0]
            assert first.data_ptr() == again.data_ptr()
