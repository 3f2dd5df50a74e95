"""Packed rows: what lies where, padded or not."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shim import testing  # noqa: E402


def test_a_row_without_padding():
    row = testing.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
    assert row.input_ids.tolist() == [[5, 6, 8]]
    assert row.labels.tolist() == [[6, 7, 9]]
    assert row.position_ids.tolist() == [[0, 1, 0]]
    assert row.loss_mask.tolist() == [[1, 1, 1]]
    assert row.spans == ((0, 2), (2, 1)) and row.ends == (2, 3) and row.total == 3
    assert row.valid.all() and not row.is_padded
    assert row.input_ids.dtype == torch.int64 and row.loss_mask.dtype == torch.float32


def test_padding_follows_every_sequence_and_fills_the_row():
    row = testing.pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], align=4, total=10)
    assert row.input_ids.tolist() == [[5, 6, 0, 0, 8, 0, 0, 0, 0, 0]]
    assert row.valid.tolist() == [True, True, False, False, True, *[False] * 5]
    assert row.loss_mask[0].tolist() == row.valid.float().tolist()
    assert row.spans == ((0, 2), (4, 1)) and row.ends == (4, 10) and row.is_padded


def test_loss_masks_and_sequences_without_a_target():
    row = testing.pack(
        [torch.tensor([5, 6, 7]), torch.tensor([3])], loss_masks=[torch.tensor([0, 1]), torch.tensor([])]
    )
    assert row.loss_mask.tolist() == [[0, 1]] and row.spans == ((0, 2), (2, 0))


@pytest.mark.parametrize(
    ("sequences", "options"),
    [
        ([], {}),
        ([torch.tensor([], dtype=torch.int64)], {}),
        ([torch.tensor([1, 2, 3])], {"total": 1}),
        ([torch.tensor([1, 2, 3])], {"loss_masks": [torch.ones(3)]}),
    ],
    ids=["nothing", "no token", "too small", "other length"],
)
def test_what_cannot_be_packed_is_refused(sequences, options):
    with pytest.raises(ValueError):
        testing.pack(sequences, **options)


def test_random_sequences_are_repeatable_and_leave_id_zero_for_padding():
    first, again = (testing.random_sequences([50, 3], vocab_size=4, seed=1) for _ in range(2))
    assert [len(sequence) for sequence in first] == [51, 4]
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert first[0].min() == 1 and first[0].max() == 3


def test_every_public_name_is_there_and_packing_needs_no_megatron():
    code = (
        "import sys; from shim import testing; testing.pack\n"
        "assert 'megatron' not in sys.modules; [getattr(testing, name) for name in testing.__all__]\n"
        "assert not hasattr(testing, 'no_such_name')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
