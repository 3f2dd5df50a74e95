"""Samples of the datasets that mask words, for BERT and T5.

What is wrong (0.12 to 0.20), silent:
1. BERTMaskedWordPieceDataset fills its padding mask up with the tokenizer's pad id in the place of 0. With a pad id of
   1, as of RoBERTa's tokenizers, every position counts as a token: attention sees the padding. The types of the
   padding are the pad id as well: another id than 0 and 1 is no row of the embedding of types, so the model raises an
   IndexError. From 0.16 on that is so for a tokenizer without a pad id, too: its types are -1.
2. With masking_do_permutation the lengths of the permuted spans come from NumPy's global state, and not from the
   sample's own, which is made of the seed and the index. A sample is another each time it is read, so a resumed run
   differs, and forked workers of a data loader draw the same numbers.

And with an error, or without an end:
3. A split without documents raises an IndexError, also if no row is asked for. With the usual split of 969,30,1 the
   test split of fewer than 500 documents has none.
4. If the number of rows is left open, as for the whole of a validation split, the compiled index builder gets None for
   it: a TypeError.
5. If no document makes a row, as one sentence makes none for BERT's next sentence, the builder looks through all of
   them two billion times.

The patch ends a sample behind its last separator: from there on its padding mask and its types are 0. While a sample is
masked with permutation, the global state is one that its own state seeds, and so has other numbers than that; then it
is as before. Samples with a pad id of 0 and without permutation are stock's.

A split without documents has no rows. An open number of rows is that of an epoch, as in GPTDataset. Before the index is
built or read, documents are looked at until one makes a row, mostly the first. If none does and rows are asked for, an
error names the corpus, the split and the remedy.

Upstream: not reported.

Delete when: a release writes 0 into the padding mask and draws from the sample's state, and those before it are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shim.patches._arguments import Function, argument
from shim.patches.megatron_core.bert_samples.index import patch_build_sample_index

SAMPLE = "megatron.core.datasets.bert_dataset:BERTMaskedWordPieceDataset.__getitem__"
INDEX = "megatron.core.datasets.masked_dataset:MaskedWordPieceDataset._build_sample_index"
MASKING = "megatron.core.datasets.masked_dataset:MaskedWordPieceDataset._create_masked_lm_predictions"


def _getitem(original: Function) -> Function:
    @functools.wraps(original)
    def __getitem__(self: Any, idx: int) -> Any:
        sample = original(self, idx)
        ends = np.flatnonzero(sample["text"] == self.config.tokenizer.sep)
        if len(ends):  # behind it there is padding alone
            sample["padding_mask"][ends[-1] + 1 :] = 0
            sample["types"][ends[-1] + 1 :] = 0
        return sample

    return __getitem__


def _create_masked_lm_predictions(original: Function) -> Function:
    state_of = argument(original, "numpy_random_state")

    @functools.wraps(original)
    def _create_masked_lm_predictions(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.config.masking_do_permutation:
            return original(self, *args, **kwargs)
        _, own, place, *_ = state_of((self, *args), kwargs).get_state()  # stock's other draws stay as they are
        outer = np.random.get_state()
        np.random.seed([*own, place])
        try:
            return original(self, *args, **kwargs)
        finally:
            np.random.set_state(outer)

    return _create_masked_lm_predictions


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SAMPLE: _getitem, INDEX: patch_build_sample_index, MASKING: _create_masked_lm_predictions}
