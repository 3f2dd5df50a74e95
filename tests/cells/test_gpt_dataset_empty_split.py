"""gpt-dataset-empty-split: a split without documents has no rows, and an error says so if some are asked for."""

import pytest

import shim
from shim import ShimError
from shim.patches.megatron_core.gpt_dataset_empty_split.proof import Rows, splits_of

CELLS = {"0.19.2": "all"}

ID = "gpt-dataset-empty-split"
pytestmark = pytest.mark.usefixtures("one_rank")  # of tests/cells/conftest.py


def applied():
    return shim.patched(only=[ID], require=[ID])


def rows(datasets):
    return [[row["tokens"].tolist() for row in map(dataset.__getitem__, range(len(dataset)))] for dataset in datasets]


def test_its_index_is_read_again(tmp_path):
    """The files of an index without rows are there for the next run, and for the other ranks."""
    with applied():
        built = [len(dataset) for dataset in splits_of([20, 0, 0], tmp_path)]
        read = [len(dataset) for dataset in splits_of([20, 0, 0], tmp_path)]
    assert built == read == [built[0], 0, 0] and built[0] >= 20


@pytest.mark.parametrize("asked", [1, 1000])
def test_rows_of_an_empty_split_are_an_error(tmp_path, asked):
    with applied(), pytest.raises(ShimError, match=rf"{asked} rows .* split 'test' of .*corpus, which has no tokens"):
        splits_of([20, 0, Rows(asked)], tmp_path)


@pytest.mark.parametrize("asked", [[20, 4, 1], [100, 0, 0], [None, None, None]])
def test_splits_with_documents_are_stocks(tmp_path, asked):
    with applied():
        found = rows(splits_of(asked, tmp_path, "8,4,4", path_to_cache=str(tmp_path / "with")))
    stock = rows(splits_of(asked, tmp_path, "8,4,4", path_to_cache=str(tmp_path / "stock")))
    assert found == stock and all(stock)


def test_an_open_number_of_rows_is_none_as_on_stock(tmp_path):
    with applied():
        found = splits_of([None, None, None], tmp_path)
    assert [len(dataset) for dataset in found[1:]] == [0, 0]
