"""The places of a packed row's rows are found once for queries and keys, and anew whenever they could differ."""

import gc
import threading

import pytest
import torch

from shim.ops.rope import thd_freqs
from shim.patches.megatron_core import _packed_rotation
from shim.patches.megatron_core._packed_rotation import gathered


@pytest.fixture
def found(monkeypatch):
    """Counts how often places are found."""
    calls = []
    find = _packed_rotation.thd_rows
    monkeypatch.setattr(_packed_rotation, "thd_rows", lambda *args, **how: calls.append(1) or find(*args, **how))
    return calls


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def table():
    return torch.randn(9, 1, 1, 4)


def right(table, cu, tokens=8, **how):
    how = {"cp_size": 1, "cp_rank": 0, **how}
    assert torch.equal(gathered(table, cu, tokens, **how), thd_freqs(table, cu, tokens, **how))


def test_keys_take_the_places_of_queries_and_the_next_layer_finds_its_own(found, table):
    cu = offsets(0, 3, 8)
    for finds in (1, 1, 2, 2):
        right(table, cu)
        assert len(found) == finds


def in_place(table, cu):
    cu[1] = 6


def other_table(table, cu):
    table[3] = table[0]  # decides whether the table has a row for each token


@pytest.mark.parametrize("change", [in_place, other_table])
def test_a_write_is_noticed(found, table, change):
    cu = offsets(0, 3, 8)
    right(table[:8], cu, row_per_token=None)
    rows = table[:8]
    right(rows, cu, row_per_token=None)
    change(rows, cu)
    right(rows, cu, row_per_token=None)
    assert len(found) == 3


def test_other_tensors_and_other_questions_find_their_own(found, table):
    cu = offsets(0, 4, 8)
    right(table, cu)
    right(table, offsets(0, 4, 8))
    right(table.clone(), cu)
    right(table, cu)
    right(table, cu, tokens=4, cp_size=2)
    right(table, cu, tokens=4, cp_size=2, cp_rank=1)
    right(table, cu, tokens=4, cp_size=2, cp_rank=1, row_per_token=False)
    assert len(found) == 7


def test_a_write_that_torch_does_not_count_is_read_after_one_rotation(found, table):
    """As of a buffer that a kernel fills for each step."""
    cu = offsets(0, 3, 8)
    right(table, cu)
    right(table, cu)
    cu.data[1] = 6
    right(table, cu)


def test_inference_and_other_threads_find_their_own(found, table):
    """A tensor of inference mode could not be saved for backward."""
    cu = offsets(0, 3, 8)
    with torch.inference_mode():
        gathered(table, cu, 8, cp_size=1, cp_rank=0)
    right(table.requires_grad_(), cu)
    thread = threading.Thread(target=right, args=(table, cu))
    thread.start()
    thread.join()
    assert len(found) == 3
    gathered(table, cu, 8, cp_size=1, cp_rank=0).sum().backward()
    assert table.grad is not None and len(found) == 3


def test_places_are_freed_with_the_offsets(found, table):
    cu = offsets(0, 3, 8)
    right(table, cu)
    assert _packed_rotation._kept.rows
    del cu
    gc.collect()
    assert not _packed_rotation._kept.rows


@pytest.mark.parametrize("trace", ["make_fx", "vmap"])
def test_traces_and_transforms_keep_nothing(found, table, trace):
    from torch.fx.experimental.proxy_tensor import make_fx

    cu = offsets(0, 3, 8)

    def rotate(table, cu):
        return gathered(table, cu, 8, cp_size=1, cp_rank=0, row_per_token=False)

    if trace == "vmap":
        out = torch.vmap(rotate, in_dims=(0, None))(torch.stack([table, table]), cu)
        assert torch.equal(out[0], thd_freqs(table, cu, 8, row_per_token=False))
    else:
        with pytest.MonkeyPatch.context() as without:
            without.setattr("shim.ops.rope.require", lambda condition, message: None)  # it reads a value
            traced = make_fx(rotate)(table, cu)
            other = offsets(0, 5, 8)
            assert torch.equal(traced(table, other), thd_freqs(table, other, 8, row_per_token=False))
    assert not _packed_rotation._kept.rows
    right(table, cu)
