"""The rows of a rotary table that packed tokens take, against the same told sequence by sequence."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from rank_shares import offsets  # noqa: E402

from shim.ops.rope import thd_freqs  # noqa: E402

RANKS = st.sampled_from([1, 2, 4]).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
DTYPES = st.sampled_from([torch.int32, torch.int64])


def held(length, ranks, rank):
    """The positions of a sequence that a rank holds."""
    if ranks == 1:
        return list(range(length))
    half = length // (2 * ranks)
    return [*range(rank * half, (rank + 1) * half), *range(length - (rank + 1) * half, length - rank * half)]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), RANKS, DTYPES)
def test_positions_are_those_of_each_sequence_by_itself(units, where, dtype):
    """Sequences of no length among them, on every rank of one, two and four."""
    ranks, rank = where
    lengths = [unit * (2 * ranks if ranks > 1 else 1) for unit in units]
    cu, table = offsets(lengths, dtype), torch.arange(sum(lengths) + 1)  # the row of a position is the position
    found = thd_freqs(table, cu, sum(lengths) // ranks, cp_size=ranks, cp_rank=rank)
    assert found.tolist() == [position for length in lengths for position in held(length, ranks, rank)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), RANKS, st.booleans())
def test_a_table_as_long_as_the_row_has_a_row_per_token(units, where, row_per_token):
    ranks, rank = where
    lengths = [unit * 2 * ranks for unit in units]
    total = sum(lengths)
    freqs = torch.randn(total, 1, 1, 4)
    found = thd_freqs(freqs, offsets(lengths), total // ranks, cp_size=ranks, cp_rank=rank, row_per_token=row_per_token)
    rows, start = [], 0
    for length in lengths:
        rows += [start * row_per_token + position for position in held(length, ranks, rank)]
        start += length
    assert torch.equal(found, freqs[rows])


@pytest.mark.parametrize("lengths", [(3, 2, 4), (3, 0, 2, 4), (9,), (3, 6, 0)])
def test_a_table_can_say_itself_that_it_has_a_row_per_token(lengths):
    """Every sequence begins with the row that the first one begins with; those without tokens begin with any."""
    by_position = torch.randn(9, 1, 1, 4)
    freqs = torch.cat([by_position[:length] for length in lengths])
    found = thd_freqs(freqs, offsets(lengths), 9, row_per_token=None)
    assert torch.equal(found, freqs)
    assert torch.equal(thd_freqs(by_position, offsets(lengths), 9, row_per_token=None), found)
    longer = torch.cat([freqs, freqs])
    found = thd_freqs(longer, offsets(lengths), 9, row_per_token=None)
    assert torch.equal(found, longer[[place for length in lengths for place in range(length)]])


def test_any_other_table_has_a_row_per_position():
    freqs = torch.randn(9, 1, 1, 4)
    assert torch.equal(thd_freqs(freqs, offsets([3, 5]), 8), freqs[[0, 1, 2, 0, 1, 2, 3, 4]])


def test_offsets_may_start_behind_zero():
    """As a part of a longer row has it: a row per token counts from the start of the whole."""
    cu = torch.tensor([4, 6, 9])
    assert thd_freqs(torch.arange(9), cu, 5, row_per_token=False).tolist() == [0, 1, 0, 1, 2]
    assert thd_freqs(torch.arange(9), cu, 5).tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("cu", "tokens", "ranks"),
    [
        ([0, 4, 8], 7, 1),
        ([0, 4, 8], 9, 1),
        ([0, 5, 3, 8], 8, 1),
        ([0, 6, 8], 4, 2),
        ([0, 8], 8, 2),
        ([0], 0, 1),
        ([[0, 4]], 4, 1),
    ],
    ids=["padding", "short", "falling", "odd halves", "not cut", "no sequence", "two dimensions"],
)
def test_offsets_that_do_not_fit_are_an_error(cu, tokens, ranks):
    with pytest.raises(ValueError, match="cu_seqlens"):
        thd_freqs(torch.zeros(64, 2), torch.tensor(cu), tokens, cp_size=ranks)


def test_a_table_that_is_too_short_is_an_error():
    with pytest.raises(IndexError):
        thd_freqs(torch.randn(4, 1, 1, 4), offsets([3, 5]), 8)


def test_gradients_reach_the_table():
    freqs = torch.randn(6, 2, requires_grad=True)
    thd_freqs(freqs, offsets([2, 3]), 5).sum().backward()
    assert freqs.grad[:, 0].tolist() == [2, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_number_of_kernels_does_not_depend_on_the_sequences(ranks):
    """And nothing is read back but, on CPU, whether the offsets fit."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    def names(sequences, rows=1024):
        with Counting() as counting:
            thd_freqs(torch.randn(rows, 4), offsets([8] * sequences), 8 * sequences // ranks, cp_size=ranks)
        return counting.names

    assert names(1) == names(64)
    assert names(64).count("aten::_local_scalar_dense") == 1
    # A table that is too short for a row for each token is not asked for them.
    assert len(names(64, rows=8)) < len(names(64)) and names(2, rows=8) == names(64, rows=8)
