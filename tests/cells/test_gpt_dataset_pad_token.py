"""gpt-dataset-pad-token: no token of the corpus counts as padding by mistake, in this process and in data workers."""

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch.utils.data import ConcatDataset, DataLoader

import shim
from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset, text_of, write_corpus

CELLS = {"0.12.0": "all"}

ID = "gpt-dataset-pad-token"
MASK = "gpt-dataset-loss-mask"  # which keeps the padding of one row out of the others
LENGTH, EOD, EPOCHS = 8, 1, 3
DOCUMENTS = [[*range(2, 2 + length), EOD] for length in (3, 9, 2, 12, 5, 7, 4, 10)]


class WithoutEnd(Tokenizer):
    """One whose end of a document is an error, or another id, as in a tokenizer that knows eos and eod."""

    def __init__(self, pad, eod, eos):
        super().__init__(pad, eod)
        self.ending = eos

    @property
    def eos(self):
        if self.ending is None:
            raise NotImplementedError("no eos")
        return self.ending


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(DOCUMENTS, tmp_path)


def training(prefix, pad, **options):
    return gpt_dataset(prefix, LENGTH, Tokenizer(pad, EOD), epochs=EPOCHS, **options)


def validation(prefix, pad):
    return gpt_dataset(prefix, LENGTH, Tokenizer(pad, EOD))


def applied():
    return shim.patched(only=[ID, MASK], require=[ID])


def assert_whole(dataset, rows):
    """Each row is that of the corpus, and all of it is trained."""
    for row, found in enumerate(rows):
        text = text_of(dataset, row)
        assert torch.equal(found["tokens"], text[:-1]) and torch.equal(found["labels"], text[1:])
        assert found["loss_mask"].all()
    assert row == len(dataset) - 1 and row > EPOCHS


def assert_padded(dataset, rows):
    """One row is filled up with token 0, which is not trained."""
    left = [int((text_of(dataset, row)[1:] == -1).sum()) for row in range(len(dataset))]
    assert sum(map(bool, left)) == 1
    for row, count in zip(rows, left, strict=True):
        assert int((row["loss_mask"] == 0).sum()) == int((row["labels"] == 0).sum()) == count
        assert not row["labels"][LENGTH - count :].any() and row["tokens"].min() >= 0


def loaded(dataset, method):
    """The rows of two passes: of two forked workers, or of a copy that stock's code for the pad id reads."""
    if method == "spawn":
        with shim.patched(only=[MASK]):
            copy = pickle.loads(pickle.dumps(dataset))
            return [[copy[row] for row in range(len(copy))] for _ in range(2)]
    loader = DataLoader(dataset, None, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    return [list(loader) for _ in range(2)]


def test_the_pad_id_of_the_dataset(prefix):
    with applied():
        assert training(prefix, EOD)._pad_token_id == training(prefix, None)._pad_token_id == -1
        assert training(prefix, 0)._pad_token_id == 0


def test_each_row_of_training_is_whole(prefix):
    with applied():
        dataset = training(prefix, EOD)
        for _ in range(2):
            assert_whole(dataset, [dataset[row] for row in range(len(dataset))])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(prefix, method):
    """Both cases at once. To a worker that is spawned the dataset takes the id along."""
    with applied():
        whole, padded = training(prefix, EOD), validation(prefix, None)
        for rows in loaded(ConcatDataset([whole, padded]), method):
            assert_whole(whole, rows[: len(whole)])
            assert_padded(padded, rows[len(whole) :])


@pytest.mark.parametrize("eos, expected", [(None, 3), (3, -1), (EOD, 3)])
def test_the_end_by_either_name(prefix, eos, expected):
    """Upstream looks at eod and eos from 0.16 on."""
    with applied():
        dataset = gpt_dataset(prefix, LENGTH, WithoutEnd(3, EOD, eos), epochs=EPOCHS)
    assert dataset._pad_token_id == expected


@pytest.mark.parametrize("mask", [False, True])
def test_eod_mask_loss_masks_as_before(prefix, mask):
    """The target behind an end of a document is masked by this option alone."""
    with applied():
        dataset = training(prefix, EOD, eod_mask_loss=mask)
        for row in range(len(dataset)):
            expected = (dataset[row]["tokens"] != EOD) if mask else torch.ones(LENGTH)
            assert torch.equal(dataset[row]["loss_mask"], expected.float())


@pytest.mark.parametrize("pad", [EOD, None])
def test_the_last_row_of_validation_is_padded(prefix, pad):
    with applied():
        dataset = validation(prefix, pad)
        assert_padded(dataset, [dataset[row] for row in range(len(dataset))])


def test_rows_without_an_extra_token(prefix):
    """Their last target is padding."""
    with applied():
        dataset = training(prefix, None, add_extra_token_to_sequence=False)
        for row in range(len(dataset)):
            assert dataset[row]["loss_mask"].tolist() == [1.0] * (LENGTH - 1) + [0.0]
            assert int(dataset[row]["labels"][-1]) == 0


def test_the_index_of_stock_is_read(prefix):
    """Neither names nor contents of the files change, and none is written anew."""

    def files():
        return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}

    folder = Path(prefix).with_name("index")
    training(prefix, EOD)
    before = files()
    with applied():
        training(prefix, EOD)[0]
    assert before and files() == before


def test_another_pad_id_is_treated_as_on_stock(prefix):
    stock = list(training(prefix, 5))
    with shim.patched(only=[ID], require=[ID]):
        found = list(training(prefix, 5))
    for row, expected in zip(found, stock, strict=True):
        assert row.keys() == expected.keys() and all(torch.equal(row[name], expected[name]) for name in row)


def test_a_user_who_asks_for_the_ambiguity_keeps_it(prefix):
    if "allow_ambiguous_pad_tokens" not in {field.name for field in dataclasses.fields(GPTDatasetConfig)}:
        pytest.skip("this release has no such option")
    with applied():
        assert training(prefix, EOD, allow_ambiguous_pad_tokens=True)._pad_token_id == EOD
        assert training(prefix, None, allow_ambiguous_pad_tokens=True)._pad_token_id == -1
