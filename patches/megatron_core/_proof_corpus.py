"""A GPTDataset over a tokenized corpus of a few documents, written as megatron-core's tools write one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

VOCABULARY = 64


class Tokenizer:
    """What GPTDataset asks of a tokenizer: the ids of padding and of the end of a document."""

    vocab_size = VOCABULARY
    unique_identifiers: ClassVar = {"class": "Tokenizer"}

    def __init__(self, pad: int | None, eod: int) -> None:
        self.pad = pad
        self.eod = eod


def write_corpus(documents: Sequence[Sequence[int]], folder: str | Path) -> str:
    """Write the documents, each with its own end, into an indexed dataset. Returns its prefix."""
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(Path(folder, "corpus"))
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.int32)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(prefix + ".idx")
    return prefix


def gpt_dataset(prefix: str, length: int, tokenizer: Any, epochs: int = 1, **options: Any) -> Any:
    """A GPTDataset of rows of `length` tokens over all documents. Its index lies beside them, and is read from there.

    epochs: above 1 the rows are those of training; else those of validation, of which the last may be padded.
    options: of GPTDatasetConfig.
    """
    import numpy

    compiled_or_not()
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = dataset_config(prefix, length, tokenizer, **{"drop_last_partial_validation_sequence": False, **options})
    corpus = IndexedDataset(prefix)
    documents = numpy.arange(len(corpus), dtype=numpy.int32)
    rows = None if epochs == 1 else epochs * int(corpus.sequence_lengths.sum()) // length - 1
    return GPTDataset(corpus, prefix, documents, rows, Split.valid if epochs == 1 else Split.train, config)


def dataset_config(prefix: str, length: int, tokenizer: Any, **options: Any) -> Any:
    """A GPTDatasetConfig for rows of `length` tokens of this corpus. The index lies beside it. options: override."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    given = {
        "random_seed": 1,
        "sequence_length": length,
        "blend": ([prefix], None),
        "split": "1,0,0",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": str(Path(prefix).with_name("index")),
        "tokenizer": tokenizer,
    }
    return GPTDatasetConfig(**{**given, **options})


def compiled_or_not() -> None:
    """Give megatron-core an index builder in Python if its own is not compiled for this Python, as in a checkout."""
    name = "megatron.core.datasets.helpers_cpp"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(build_sample_idx_int32=sample_index, build_sample_idx_int64=sample_index)


def sample_index(
    sizes: Any, documents: Any, length: int, epochs: int, tokens: int, drop_last: bool = True, extra: int = 1
) -> Any:
    """Where each row begins, [rows + 1, 2]: the place of its document in `documents`, and the token of the document.

    documents: those of all epochs, in order. tokens: of one epoch. extra: 1 if a row ends with the first token of the
    next one.
    """
    import numpy

    ends, total = numpy.cumsum(sizes[documents]), epochs * tokens - extra
    rows = total // length if drop_last else -(-total // length)
    begins = numpy.minimum(numpy.arange(rows + 1) * length, total)
    places = numpy.minimum(numpy.searchsorted(ends, begins, side="right"), len(ends) - 1)
    return numpy.stack([places, begins - (ends - sizes[documents])[places]], axis=1).astype(numpy.int32)


def text_of(dataset: Any, row: int) -> torch.Tensor:
    """The tokens of a row as they are in the corpus, with its padding: one more than the row has."""
    return torch.from_numpy(dataset._query_document_sample_shuffle_indices(row)[0])
