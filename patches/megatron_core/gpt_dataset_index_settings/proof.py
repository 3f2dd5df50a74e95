"""Proofs of gpt-dataset-index-settings."""

from __future__ import annotations

import tempfile
from typing import Any

from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset, write_corpus
from shim.testing.proof import Here, proof

LENGTH, EOD = 8, 1
# The shuffle takes them in the order 6, 2, 1, 0, 4, 3, 5, so that rows end with documents. The last row is not full.
DOCUMENTS = [
    [*range(7 * number + 2, 7 * number + 1 + tokens), EOD] for number, tokens in enumerate((8, 8, 4, 8, 8, 12, 4))
]
LAST, EXTRA = "drop_last_partial_validation_sequence", "add_extra_token_to_sequence"


def rows(prefix: str, **settings: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of each row."""
    dataset = gpt_dataset(prefix, LENGTH, Tokenizer(0, EOD), **{LAST: True, **settings})
    found = [dataset[row] for row in range(len(dataset))]
    return [(row["tokens"].tolist(), row["labels"].tolist()) for row in found]


def wrong_rows(setting: str, before: bool) -> int:
    """Rows that are not those of a new index, if the index was built before with the setting as given."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        prefix = write_corpus(DOCUMENTS, first)
        rows(prefix, **{setting: before})
        found, right = (
            rows(prefix, **{setting: not before}),
            rows(write_corpus(DOCUMENTS, second), **{setting: not before}),
        )
    return sum(a != b for a, b in zip(found, right, strict=False)) + abs(len(found) - len(right))


@proof("{:.0f} rows wrong or missing", right="the rows are those of a new index")
def the_last_row_is_there_if_the_setting_says_so(here: Here) -> int:
    """GPTDataset ignores a changed drop_last_partial_validation_sequence if it has cached an index.

    To reproduce: build a GPTDataset with `Split.valid` of a corpus that ends within a row, with
    `drop_last_partial_validation_sequence=True`. Build it again with False and the same `path_to_cache`: the last row
    is still missing. The setting is not in the hash that names the files of the index. Right are the rows of a new
    cache.

    From 0.12 on.
    """
    wrong: int = here.run(wrong_rows, LAST, True)[0]
    return wrong


@proof("{:.0f} rows wrong or missing", right="the rows are those of a new index")
def targets_are_of_the_setting(here: Here) -> int:
    """GPTDataset ignores a changed add_extra_token_to_sequence if it has cached an index.

    To reproduce: build a GPTDataset with `add_extra_token_to_sequence=False`, and again with True and the same
    `path_to_cache`. Rows that end with a document have a last target from the document that follows in the corpus, and
    not from that of the next row. Right are the rows of a new cache.

    From 0.12 on.
    """
    wrong: int = here.run(wrong_rows, EXTRA, False)[0]
    return wrong
