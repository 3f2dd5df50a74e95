"""The packed roll against the plain statement of its rule, a loop over sequences."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from rank_shares import offsets  # noqa: E402

from shim.ops import packed_roll, roll_index  # noqa: E402

pytestmark = pytest.mark.usefixtures("mask_or_gaps")


@st.composite
def rows(draw):
    """(valid lengths, slot lengths, tokens behind the last slot), empty sequences and slots included."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=6))
    slots = [length + draw(st.integers(0, 3)) for length in lengths]
    return lengths, slots, draw(st.integers(0, 3))


def rolled_one_by_one(tensor, lengths, slots):
    """The rule itself: tokens move left inside their sequence, everything else is zero. dim 0."""
    result, start = torch.zeros_like(tensor), 0
    for length, slot in zip(lengths, slots):
        result[start : start + max(length - 1, 0)] = tensor[start + 1 : start + max(length, 1)]
        start += slot
    return result


@settings(deadline=None, max_examples=200, derandomize=True)
@given(rows(), st.sampled_from([torch.int32, torch.int64]))
def test_it_is_the_loop_over_sequences(row, dtype):
    lengths, slots, behind = row
    tensor = torch.arange(1, sum(slots) + behind + 1)
    found = packed_roll(tensor, offsets(lengths, dtype), offsets(slots, dtype))
    assert torch.equal(found, rolled_one_by_one(tensor, lengths, slots))
    if lengths == slots:
        assert torch.equal(packed_roll(tensor, offsets(lengths, dtype)), found)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(rows())
def test_valid_positions_are_those_that_hold_tokens(row):
    lengths, slots, behind = row
    expected = torch.cat([torch.arange(slot) < length for length, slot in zip(lengths, slots)] or [torch.zeros(0)])
    expected = torch.cat([expected.bool(), torch.zeros(behind, dtype=torch.bool)])
    index = roll_index(offsets(lengths), offsets(slots), sum(slots) + behind, "cpu")
    assert torch.equal(index.valid, expected)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_any_dtype(dtype):
    found = packed_roll(torch.tensor([1, 1, 1, 1, 1]).to(dtype), offsets([3, 2]))
    assert found.dtype == dtype and found.float().tolist() == [1, 1, 0, 1, 0]


def test_not_a_number_does_not_survive_where_zero_belongs():
    found = packed_roll(torch.tensor([0.0, 1, float("nan"), float("inf")]), offsets([2]), offsets([4]))
    assert found.tolist() == [1, 0, 0, 0]


def test_the_gradient_is_the_roll_back():
    values = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: packed_roll(x, offsets([3, 2])), values)
    assert torch.autograd.gradgradcheck(lambda x: packed_roll(x, offsets([3, 2])) ** 2, values)


def test_input_and_non_contiguous_views_stay_as_they_are():
    base = torch.arange(12).view(6, 2)
    before = base.clone()
    found = packed_roll(base.t(), offsets([4, 2]))
    assert torch.equal(base, before) and found[0].tolist() == [2, 4, 6, 0, 10, 0]


@pytest.mark.parametrize(
    ("valid", "padded", "message"),
    [
        (torch.zeros(2, 2), None, r"shape \[N \+ 1\]"),
        (torch.zeros(0), None, r"shape \[N \+ 1\]"),
        (torch.zeros(2), torch.zeros(3), "cu_seqlens_padded"),
    ],
)
def test_lengths_that_do_not_fit_are_an_error(valid, padded, message):
    with pytest.raises(ValueError, match=message):
        packed_roll(torch.arange(4), valid.int(), None if padded is None else padded.int())


def test_one_graph_under_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(packed_roll, fullgraph=True, backend="eager")
    assert compiled(torch.arange(5), offsets([3, 2])).tolist() == [1, 2, 0, 4, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_it_does_not_wait_for_the_gpu():
    """Host synchronisation raises in this mode."""
    tensor, lengths = torch.arange(4096, device="cuda"), offsets([1000, 96, 3000]).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = packed_roll(tensor, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), packed_roll(tensor.cpu(), lengths.cpu()))
