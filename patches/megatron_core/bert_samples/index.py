"""The index of a corpus: defects 3 to 5."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shim._errors import ShimError
from shim.patches._arguments import Function, argument

LONGEST = 512  # tokens of a sentence: the compiled builder skips documents of several with a longer one


class NoRowsError(ShimError, ValueError):
    """Rows are asked for of documents that make none."""


def patch_build_sample_index(original: Function) -> Function:
    fewest_of = argument(original, "min_sentences_per_sample")

    @functools.wraps(original)
    def _build_sample_index(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked, fewest = self.num_samples, fewest_of((self, *args), kwargs)
        if not len(self.indices) and not asked:
            return _NO_ROWS
        if asked == 0:
            return original(self, *args, **kwargs)
        if not any(_makes_rows(self.dataset, document, fewest) for document in self.indices):
            if asked is None:
                return _NO_ROWS
            raise NoRowsError(
                f"[bert-samples] {asked} rows are asked for of the split '{self.index_split.name}' of "
                f"{self.dataset_path}. None of its {len(self.indices)} documents makes one: that takes {fewest} "
                f"sentences, none longer than {LONGEST} tokens. Without this patch megatron-core looks through them "
                "two billion times. Cut documents into sentences, give the split a larger part, or ask for no rows of "
                "it (as with eval_iters=0)."
            )
        if asked is not None:
            return original(self, *args, **kwargs)
        self.num_samples = 1  # the compiled builder takes no None, and ends with the epoch that has so many rows
        try:
            return original(self, *args, **kwargs)
        finally:
            self.num_samples = None

    return _build_sample_index


_NO_ROWS = np.zeros((0, 3), dtype=np.uint32)


def _makes_rows(corpus: Any, document: int, fewest: int) -> bool:
    begin, end = map(int, corpus.document_indices[document : document + 2])
    if end - begin < max(fewest, 1):
        return False
    return end - begin == 1 or int(corpus.sequence_lengths[begin:end].max()) <= LONGEST
