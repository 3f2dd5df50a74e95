"""Proofs of bert-samples."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

from shim.patches.megatron_core._proof_corpus import compiled_or_not
from shim.testing.proof import CannotRunError, Here, proof

CLS, SEP, MASK, FIRST = 2, 3, 4, 5
LENGTH = 32
MASKING: dict[str, Any] = {
    "masking_probability": 0.3,
    "masking_max_ngram": 3,
    "masking_do_full_word": False,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


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
        **{**MASKING, "masking_do_permutation": permutes},
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


class Tokenizer:
    """What the datasets ask a tokenizer for while they are built."""

    cls, sep, mask, pad, eod, bos, eos = CLS, SEP, MASK, 0, 1, CLS, SEP
    additional_special_tokens_ids = tuple(range(90, 99))
    inv_vocab: ClassVar = {id: f"word{id}" for id in range(100)}
    unique_identifiers: ClassVar = {"class": "Tokenizer"}


def splits_of(
    rows: Sequence[int | None],
    folder: str,
    sentences: int = 2,
    split: str = "1,0,0",
    words: int = 7,
    kind: str = "bert",
) -> list[Any]:
    """The datasets of 16 documents for training, validation and test, with so many rows asked for; None without part.

    words: of each sentence. kind: of the datasets, "bert" or "t5".
    """
    compiled_or_not()
    from megatron.core.datasets import bert_dataset, helpers, t5_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    if not hasattr(helpers, "build_mapping"):
        raise CannotRunError("the helpers of megatron-core's datasets are not compiled for this Python")
    Path(folder).mkdir(exist_ok=True)
    prefix = str(Path(folder, "corpus"))
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    for _ in range(16):
        builder.add_document(torch.full((sentences * words,), FIRST), [words] * sentences)
    builder.finalize(prefix + ".idx")
    module: Any = {"bert": bert_dataset, "t5": t5_dataset}[kind]
    name = f"{kind.upper()}MaskedWordPieceDataset"
    own: dict[str, Any] = {"classification_head": True} if kind == "bert" else {"sequence_length_decoder": LENGTH}
    config = getattr(module, name + "Config")(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split=split,
        path_to_cache=str(Path(folder, "index")),
        tokenizer=Tokenizer(),
        short_sequence_probability=0.1,
        **MASKING,
        **own,
    )
    kinds: Any = getattr(module, name)
    found: list[Any] = BlendedMegatronDatasetBuilder(kinds, list(rows), lambda: True, config).build()
    return found


def lengths_of(rows: Sequence[int | None], **options: Any) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        return [len(dataset) for dataset in splits_of(rows, folder, **options) if dataset is not None]


@proof(
    "{:.0f} rows", right="the splits have no rows", defect="crash", crashes=r"^IndexError: index -1 is out of bounds"
)
def a_split_without_documents_has_no_rows(here: Here) -> int:
    """Datasets of BERT and T5 cannot be built if a split of the corpus gets no document.

    To reproduce: write an IndexedDataset of 16 documents, and build BERTMaskedWordPieceDatasets of it with
    `BlendedMegatronDatasetBuilder`, `split="969,30,1"` and the sizes 16, 0 and 0: "IndexError: index -1 is out of
    bounds for axis 0 with size 0" in `_build_sample_index`.

    Right are splits with no rows, as with a split of zero. From 0.12 on.
    """
    return sum(here.run(functools.partial(lengths_of, (16, 0, 0), split="969,30,1"))[0][1:])


@proof(
    "{:.0f} rows missing",
    right="a row of each document",
    defect="crash",
    crashes=r"^TypeError: build_mapping\(\): incompatible function arguments",
)
def an_open_number_of_rows_is_an_epoch(here: Here) -> int:
    """Datasets of BERT and T5 cannot be built with an open number of rows.

    To reproduce: as above with the sizes None, None, None and `split="1,0,0"`: "TypeError: build_mapping():
    incompatible function arguments".

    The compiled function wants a number. Right is an epoch, as the docstring of the dataset says: here one row of each
    of 16 documents. From 0.12 on.
    """
    return 16 - sum(here.run(lengths_of, (None, None, None))[0])


def epochs_of_nothing() -> int:
    """How many epochs the compiled builder is to look for rows in documents that make none."""
    compiled_or_not()
    from megatron.core.datasets import helpers

    asked = [0]

    def counted(documents: Any, lengths: Any, epochs: int, *_: Any) -> Any:
        asked.append(epochs)
        return np.zeros((0, 3), dtype=np.uint32)

    with mock.patch.object(helpers, "build_mapping", counted, create=True):
        try:
            lengths_of((5, 0, 0), sentences=1)
        except ValueError:
            return max(asked)
        return max(asked)


@proof("looks through the documents {:.1e} times", right="an error, or no look", defect="hang")
def documents_that_make_no_row_are_an_error(here: Here) -> int:
    """Datasets of BERT are built without an end if no document makes a row.

    To reproduce: as above with documents of one sentence, `classification_head=True`, `split="1,0,0"` and the sizes 5,
    0 and 0. The build stands still in `build_mapping`, which gets 2147483646 epochs, and looks through the documents in
    each. Here a function in its place notes the number and returns.

    Right is an error. From 0.12 on.
    """
    return int(here.run(epochs_of_nothing)[0])
