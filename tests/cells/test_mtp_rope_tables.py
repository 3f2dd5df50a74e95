"""MTP with tables of rotary embeddings that a trainer makes: a row per position, a row per packed token, mrope."""

import pytest
import torch

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.12.3": "all"}

ABOUT = ["mtp-packed-sequences", "mtp-recompute"]  # the patches, see chosen.py

IDS = ["mtp-packed-sequences", "mtp-recompute", "rope-fusion"]
if not all(shim.plan()[id].wanted for id in IDS):
    pytest.skip("these sources do not get all three patches", allow_module_level=True)
LENGTHS = (5, 7, 4)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROTARY = 8  # of a head of 32 / 4 channels


def mrope_rows(length, seed):
    """Angles [length, 1, 1, 8] of positions on three axes, as of text with pictures: they begin at zero and jump."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (3, length), generator=generator)
    steps[:, 0] = 0
    positions = steps.cumsum(1).float()
    inverse = 10000 ** -(torch.arange(ROTARY // 2) / (ROTARY // 2))
    axis = torch.tensor([0, 0, 1, 2])
    angles = positions[axis].t() * inverse
    return torch.cat([angles, angles], 1)[:, None, None]


class Tables(torch.nn.Module):
    """In the place of a model's rotary embeddings: hands out the tables of one forward pass after another."""

    def __init__(self, upstream, tables):
        super().__init__()
        self.upstream, self.tables = upstream, list(tables)

    def get_rotary_seq_len(self, *args, **kwargs):
        return self.upstream.get_rotary_seq_len(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self.tables.pop(0)


def tables_of(kind, row, upstream):
    """(the table of the packed row, those of its sequences alone)."""
    padded = [end - start for (start, _), end in zip(row.spans, row.ends, strict=True)]
    lengths = [length for _, length in row.spans]
    if kind == "mrope":
        rows = [mrope_rows(length, seed) for seed, length in enumerate(padded)]
        return torch.cat(rows), [rows[n][:length] for n, length in enumerate(lengths)]
    by_position = upstream(max(padded))
    alone = [by_position[:length] for length in lengths]
    if kind == "position":
        return by_position, alone
    return torch.cat([by_position[:length] for length in padded]), alone


def model_of(**options):
    return testing.build_gpt(mtp_num_layers=2, max_sequence_length=64, **options)


@pytest.fixture(scope="module", autouse=True)
def applied():
    with testing.megatron_on_cpu(), shim.patched(only=IDS, require=IDS), testing.layout_initialised(Layout()):
        yield


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("align", [1, 4], ids=["plain", "padded"])
@pytest.mark.parametrize("kind", ["position", "token", "mrope"])
def test_packed_rows_are_as_each_sequence_alone(kind, align, recompute):
    """Losses and all gradients; the row of a table that a token gets is that of its place in its own sequence."""
    row = testing.pack(testing.random_sequences(LENGTHS), align=align)
    found = []
    for packed in (True, False):
        model = model_of(**(RECOMPUTE if recompute and packed else {}))
        whole, alone = tables_of(kind, row, model.rotary_pos_emb)
        model.rotary_pos_emb = Tables(model.rotary_pos_emb, [whole] if packed else alone)
        found.append((testing.run_packed if packed else testing.run_alone)(model, row))
    assert testing.worst(testing.differences(*found)) < 1e-6


@pytest.mark.parametrize("kind", ["token", "mrope"])
def test_recompute_changes_no_bit(kind):
    row = testing.pack(testing.random_sequences(LENGTHS), align=4)
    found = []
    for options in ({}, RECOMPUTE):
        model = model_of(**options)
        model.rotary_pos_emb = Tables(model.rotary_pos_emb, [tables_of(kind, row, model.rotary_pos_emb)[0]])
        found.append(testing.run_packed(model, row))
    plain, recomputed = found
    assert all(torch.equal(plain.grads[name], recomputed.grads[name]) for name in plain.grads)
    assert torch.equal(plain.main, recomputed.main)


def test_an_unpacked_row_with_a_table_of_its_own():
    """Position tables and mrope tables are the same shape there: one row per token of the only sequence."""
    row = testing.pack(testing.random_sequences([6]))
    model = model_of()
    model.rotary_pos_emb = Tables(model.rotary_pos_emb, [mrope_rows(6, 0)])
    other = model_of()
    other.rotary_pos_emb = Tables(other.rotary_pos_emb, [mrope_rows(6, 0)])
    assert testing.worst(testing.differences(testing.run_packed(model, row), testing.run_alone(other, row))) < 1e-6
