"""bert-samples: padding is masked and typed by 0 for every pad id, and a permuted sample is a function of its index."""

import numpy as np
import pytest

import shim
from shim.patches.megatron_core.bert_samples.proof import (
    LENGTH,
    bert_dataset,
    length_of,
    lengths_of,
    sentences_of,
    splits_of,
)

CELLS = {"0.19.2": "all"}

ID = "bert-samples"


def applied():
    return shim.patched(only=[ID], require=[ID])


def same(found, expected):
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("pad", [0, 1, 200, -1])
def test_padding_is_masked_and_has_the_first_type(pad):
    """Tokens, labels and the mask of the loss are stock's."""
    stock = bert_dataset(pad)[0]
    with applied():
        found = bert_dataset(pad)[0]
    end = length_of(sentences_of())
    assert end < LENGTH and found["padding_mask"].tolist() == [1] * end + [0] * (LENGTH - end)
    assert not found["types"][end:].any() and found["types"][:end].tolist() == stock["types"][:end].tolist()
    for name in ("text", "labels", "loss_mask", "is_random", "truncated"):
        assert np.array_equal(found[name], stock[name])
    if pad == 0:
        assert same(found, stock)


def test_a_sample_without_padding_is_stocks():
    full = [list(range(5, 5 + LENGTH // 2)), list(range(30, 30 + LENGTH // 2))]
    stock = bert_dataset(1, sentences=full)[0]
    with applied():
        found = bert_dataset(1, sentences=full)[0]
    assert same(found, stock) and found["padding_mask"].all()


def test_a_permuted_sample_is_one_and_draws_nothing_from_others():
    """The global state is as before, also after an error."""
    sentences = sentences_of(2, 14)
    with applied():
        dataset = bert_dataset(permutes=True, sentences=sentences)
        np.random.seed(3)
        before = np.random.get_state()[1].tolist()
        first = dataset[0]
        assert np.random.get_state()[1].tolist() == before
        np.random.seed(4)
        assert same(dataset[0], first)
        dataset.config.tokenizer.inv_vocab = {}
        before = np.random.get_state()[1].tolist()
        with pytest.raises(KeyError):
            dataset[0]
        assert np.random.get_state()[1].tolist() == before
    plain = bert_dataset(sentences=sentences)[0]
    assert (first["text"] != plain["text"]).any()


def test_lengths_of_permuted_spans_come_from_numbers_of_their_own():
    """Those that shuffle candidates and choose masks are the numbers of the seed."""
    dataset, drawn = bert_dataset(permutes=True), []

    def drawn_next(self, own):
        states = np.random.get_state(), np.random.RandomState(self.config.random_seed).get_state()
        for state in states if not drawn else ():
            other = np.random.RandomState()
            other.set_state(state)
            drawn.append(set(other.random_sample(1000)))
        return type(dataset).__base__._get_token_mask(self, own)

    dataset.__class__ = type("Watched", (type(dataset),), {"_get_token_mask": drawn_next})
    with applied():
        dataset[0]
    lengths, others = drawn
    assert not lengths & others


kinds = pytest.mark.parametrize("kind", ["bert", "t5"])


@kinds
def test_splits_of_few_documents(one_rank, kind, tmp_path):
    """Also if their index is read again, with an open number of rows, and with rows that are asked for."""
    with applied():
        for asked in [(16, 0, 0), (None, None, None)]:
            built = [lengths_of(asked, kind=kind, split="969,30,1") for _ in range(2)]
            assert built == [[16, 0, 0]] * 2
            assert [len(found) for found in splits_of(asked, str(tmp_path), kind=kind, split="969,30,1")] == [16, 0, 0]
        with pytest.raises(ValueError, match=r"\[bert-samples\] 5 rows .* split 'test' of .* None of its 0 documents"):
            lengths_of((16, 0, 5), kind=kind, split="969,30,1")


@kinds
@pytest.mark.parametrize("wrong", [{"sentences": 1}, {"words": 513}], ids=["short", "long"])
def test_documents_that_make_no_row(one_rank, kind, wrong):
    """A sentence alone makes a row of T5. Without the patch the builder does not return."""
    with applied():
        if kind == "t5" and "sentences" in wrong:
            assert lengths_of((5, 0, 0), kind=kind, **wrong) == [16]
            return
        with pytest.raises(ValueError, match=r"5 rows .* None of its 16 documents makes one"):
            lengths_of((5, 0, 0), kind=kind, **wrong)
        assert lengths_of((None, None, None), kind=kind, **wrong) == [0]
        assert lengths_of((0, 0, 0), kind=kind, **wrong) == [0]


@kinds
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_splits_that_stock_builds_are_its_own(one_rank, kind, rows, tmp_path):
    stock = splits_of((rows, 0, 0), str(tmp_path / "stock"), kind=kind)[0].sample_index.tolist()
    with applied():
        assert splits_of((rows, 0, 0), str(tmp_path / "with"), kind=kind)[0].sample_index.tolist() == stock
