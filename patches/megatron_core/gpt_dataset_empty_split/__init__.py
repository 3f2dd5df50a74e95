"""Splits of a corpus that get no document.

What is wrong (0.12 to 0.20): GPTDataset counts epochs until their tokens are as many as it is asked for, plus one for
the last target. Of a split without documents an epoch has no tokens, so it counts for ever, also if no row is asked
for. With the usual split of 969,30,1 the test split of fewer than 500 documents is empty: such a run stands still
while it builds its datasets, without a message, on one busy core.

The patch gives such a split no rows if none is asked for, as stock does if the number of rows is left open. If rows are
asked for, it raises an error that names the corpus, the split and the remedy. Other splits do not change.

Upstream: open.

Delete when: megatron-core itself ends the count, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim._errors import ShimError
from shim.patches._arguments import Function, argument

COUNT = "megatron.core.datasets.gpt_dataset:GPTDataset._get_num_epochs"


def _get_num_epochs(original: Function) -> Function:
    tokens_of = argument(original, "num_tokens_per_epoch")

    @functools.wraps(original)
    def _get_num_epochs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_samples is None or tokens_of((self, *args), kwargs) > 0:
            return original(self, *args, **kwargs)
        if self.num_samples == 0:
            return 1
        split = self.index_split.name
        raise ShimError(
            f"gpt-dataset-empty-split: {self.num_samples} rows are asked for of the split '{split}' of "
            f"{self.dataset_path}, which has no tokens: the config's split gives it {len(self.indices)} of the "
            "documents. Without this patch megatron-core looks for them for ever. Give the split a larger part, cut "
            "the corpus into more documents, or ask for no rows of it (as with eval_iters=0)."
        )

    return _get_num_epochs


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {COUNT: _get_num_epochs}
