"""Proofs of bert-samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from shim.testing.corpus import compiled_or_not
from shim.testing.proof import Here, proof

CLS, SEP, MASK, FIRST = 2, 3, 4, 5
LENGTH = 32


def sentences_of(count: int = 2, tokens: int = 10) -> list[list[int]]:
    return [list(range(FIRST + tokens * n, FIRST + tokens * (n + 1))) for n in range(count)]


def bert_dataset(pad: int = 0, permutes: bool = False, sentences: list[list[int]] | None = None) -> Any:
    """A dataset of one sample, whose index is made by hand: upstream's needs compiled helpers."""
    compiled_or_not()
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset

    sentences = sentences_of() if sentences is None else sentences
    words = {id: f"word{id}" for id in range(100)}
    dataset = BERTMaskedWordPieceDataset.__new__(BERTMaskedWordPieceDataset)
    dataset.config = SimpleNamespace(
        tokenizer=SimpleNamespace(cls=CLS, sep=SEP, mask=MASK, pad=pad, inv_vocab=words),
        random_seed=1,
        sequence_length=LENGTH,
        classification_head=True,
        masking_probability=0.3,
        masking_max_ngram=3,
        masking_do_full_word=False,
        masking_do_permutation=permutes,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    dataset.dataset, dataset.sample_index = sentences, np.array([[0, len(sentences), LENGTH - 3]])
    dataset.token_lookup, dataset._pad_token_id = list(words), pad
    return dataset


def length_of(sentences: list[list[int]]) -> int:
    """Tokens of a sample: those of both parts, [CLS], and [SEP] behind each part."""
    return sum(map(len, sentences)) + 3


@proof("{:.0f} positions of padding are attended", right="none of them is")
def padding_is_not_attended(here: Here) -> int:
    """BERT's padding mask lets attention see the padding if the tokenizer's pad id is 1.

    To reproduce: ask a BERTMaskedWordPieceDataset whose tokenizer has `pad = 1`, as RoBERTa's have, for a sample that
    is shorter than `sequence_length`, and count the ones of `padding_mask` behind its last [SEP].

    The mask is filled up with the pad id. Right is 0, as with a pad id of 0. From 0.12 on.
    """
    sample = here.run(lambda: bert_dataset(pad=1)[0])[0]
    return int((sample["padding_mask"][length_of(sentences_of()) :] != 0).sum())


def other_tokens() -> int:
    """How many tokens of a sample differ when it is read again, nine times."""
    dataset = bert_dataset(permutes=True, sentences=sentences_of(2, 14))
    np.random.seed(0)
    first = dataset[0]["text"]
    return int(sum((dataset[0]["text"] != first).sum() for _ in range(9)))


@proof("{:.0f} tokens differ when a sample is read again", right="a sample is the same each time")
def a_permuted_sample_is_repeatable(here: Here) -> int:
    """With `masking_do_permutation` a sample of a masked dataset is another each time it is read.

    To reproduce: ask a BERTMaskedWordPieceDataset with `masking_do_permutation=True` for one sample ten times, and
    compare `text`.

    The lengths of permuted spans come from NumPy's global state. Right is one sample for one seed and index, as without
    permutation. From 0.12 on.
    """
    return int(here.run(other_tokens)[0])
