"""The places of a packed row's rows are found once for queries and keys, and anew whenever they could differ."""

import gc
import threading

import pytest
import torch

from shim.ops.rope import thd_freqs
from shim.patches.megatron_core import _packed_rotation
from shim.patches.megatron_core._packed_rotation import gathered, of_one_pass
from shim.testing import Footprint


@pytest.fixture
def found(monkeypatch):
    """Counts how often the runs of a row are found."""
    calls = []
    find = _packed_rotation.thd_runs
    monkeypatch.setattr(_packed_rotation, "thd_runs", lambda *args, **how: calls.append(1) or find(*args, **how))
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


def block(layers, packed_seq_params=True):
    """The forward pass of a transformer block with these layers."""

    def forward(self, packed_seq_params=None):
        return [layer() for layer in layers]

    return of_one_pass(forward)(None, packed_seq_params=packed_seq_params)


def test_layers_of_a_pass_share_what_is_found(found, table):
    """Those of a row that is not packed, or outside of a pass, find their own."""
    cu, kv = offsets(0, 3, 8), offsets(0, 3, 8)
    layer = [lambda: right(table, cu), lambda: right(table, cu)]
    block(layer * 3)
    assert len(found) == 1
    block([lambda: right(table, cu), lambda: right(table, kv)] * 3)
    assert len(found) == 3
    block(layer * 3, packed_seq_params=None)
    assert len(found) == 6
    assert _packed_rotation._kept.forward is None


@pytest.mark.parametrize("rotations", [1, 2, 3])
@pytest.mark.parametrize("how", ["data", "in place"])
def test_nothing_is_kept_from_one_pass_to_the_next(found, table, rotations, how):
    """As of a buffer that a kernel fills for each microbatch; also if a pass has rotated an odd number of times."""
    cu = offsets(0, 3, 8)
    for end in (3, 6, 2):
        (cu.data if how == "data" else cu)[1] = end
        block([lambda: right(table, cu)] * rotations)
    assert len(found) == 3


def test_a_counted_write_within_a_pass_is_noticed(found, table):
    cu = offsets(0, 3, 8)
    block([lambda: right(table, cu), lambda: right(table, cu), lambda: cu.copy_(offsets(0, 5, 8))] * 2)
    assert len(found) == 2


def test_an_exception_ends_a_pass(found, table):
    cu = offsets(0, 3, 8)

    def fail():
        raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        block([lambda: right(table, cu), fail])
    cu.data[1] = 6
    right(table, cu)
    assert len(found) == 2 and _packed_rotation._kept.forward is None


def test_a_pass_within_a_pass_has_its_own(found, table):
    """As of a vision encoder within a language model. The outer one keeps what it has found."""
    cu, images = offsets(0, 3, 8), offsets(0, 4, 8)
    block([lambda: right(table, cu), lambda: block([lambda: right(table, images)] * 4), lambda: right(table, cu)])
    assert len(found) == 2


def test_another_thread_has_no_part_in_a_pass(found, table):
    cu = offsets(0, 3, 8)

    def elsewhere():
        thread = threading.Thread(target=right, args=(table, cu))
        thread.start()
        thread.join()

    block([lambda: right(table, cu), elsewhere])
    assert len(found) == 2


class Recomputed(torch.autograd.Function):
    """A layer that runs again in backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer()
        return gradient, None


def test_layers_that_one_backward_pass_recomputes_share_what_is_found(found, table):
    """The next one finds its own, of other values that torch has not counted."""
    cu = offsets(0, 3, 8)
    for end in (3, 6):
        cu.data[1] = end
        x = torch.ones(1, requires_grad=True)
        for _ in range(5):
            x = Recomputed.apply(x, lambda: right(table, cu))
        x.sum().backward()
    assert len(found) == 2


def test_nothing_that_grows_with_the_row_is_held_behind_keys():
    """Without the garbage collector, and if keys have offsets of their own."""
    table, cu, kv = torch.randn(4097, 1, 1, 4), offsets(0, 96, 4096), offsets(0, 96, 4096)
    gc.disable()
    try:
        for keys in (cu, kv):
            layer = [lambda: right(table, cu, 4096), lambda keys=keys: right(table, keys, 4096)]
            block(layer)
            held = []
            with Footprint() as footprint:
                block([*layer, lambda footprint=footprint, held=held: held.append(footprint.held_bytes)] * 4)
            assert len(held) == 4 and max(held) < 512
    finally:
        gc.enable()
