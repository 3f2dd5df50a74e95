"""Proof of gpt-dataset-empty-split."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from shim.patches.megatron_core._proof_corpus import Tokenizer, compiled_or_not, dataset_config, write_corpus
from shim.testing.proof import Here, proof

LENGTH, EOD = 8, 1
DOCUMENTS = [[*range(2, 12), EOD]] * 16
USUAL_SPLIT = "969,30,1"  # of Megatron-LM: training, validation, test


class Rows(int):
    """A number of rows that notices if somebody counts up to their tokens for ever."""

    seen = 0

    def __mul__(self, other: int) -> Rows:
        return Rows(int(self) * other)

    def __add__(self, other: int) -> Rows:
        return Rows(int(self) + other)

    def __gt__(self, other: Any) -> bool:
        self.seen += 1
        if self.seen > 1000:
            raise RuntimeError(f"after 1000 epochs there are {other} tokens")
        return int(self) > other


def splits_of(rows: Sequence[int], folder: str, split: str = USUAL_SPLIT, **options: Any) -> list[Any]:
    """The datasets of a small corpus for training, validation and test, with so many rows asked for."""
    compiled_or_not()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    config = dataset_config(write_corpus(DOCUMENTS, folder), LENGTH, Tokenizer(0, EOD), **{"split": split, **options})
    found: list[Any] = BlendedMegatronDatasetBuilder(GPTDataset, list(rows), lambda: True, config).build()
    return found


def rows_of_empty_splits() -> int:
    """How many rows validation and test have, of which none is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        _, valid, test = splits_of([20, Rows(0), Rows(0)], folder)
        return len(valid) + len(test)


@proof(
    "{:.0f} rows",
    right="splits without documents have no rows",
    defect="hang",
    crashes=r"^RuntimeError: after 1000 epochs there are 0 tokens",
)
def a_split_without_documents_is_built(here: Here) -> int:
    """GPTDataset counts epochs for ever if a split of the corpus gets no document.

    To reproduce: write an IndexedDataset of 16 documents, and build GPTDatasets of it with
    `BlendedMegatronDatasetBuilder`, `split="969,30,1"` and the sizes 20, 0 and 0. Validation and test get
    none of the documents. `_get_num_epochs` adds the tokens of an epoch, 0, until they are as many as those of 0 rows
    and one more. It never returns. Here the number of rows raises an error after 1000 comparisons.

    Right are splits with no rows, as with `None` for the sizes. From 0.12 on.
    """
    rows: int = here.run(rows_of_empty_splits)[0]
    return rows
