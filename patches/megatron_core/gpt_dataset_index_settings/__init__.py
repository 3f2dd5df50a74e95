"""Cached indexes of GPTDataset that were built with other settings.

What is wrong (0.12 to 0.20): GPTDataset keeps its indexes in files whose names are a hash of what they depend on. Two
settings of GPTDatasetConfig are not in the hash, so that a run which changes them gets the index of the run before, in
silence:
- `drop_last_partial_validation_sequence`: the last row of the validation set is there or missing against the setting.
- `add_extra_token_to_sequence`: if the run before had no extra token, a row that ends with a document takes its last
  target from the document that lies behind it in the corpus, and not from that of the next row. The number of rows may
  be another, too.

The patch gives the files of an index another name if one of the settings is not the default, with which nearly all
indexes are built. Those of the default are found as before, with and without shim. The others are built once more.
`fast_cache_load` and `defer_npy_index_mmap` build nothing: they take what is there under the new name, or else under
stock's.

Upstream: open.

Delete when: megatron-core itself has both settings in the hash, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

BUILD = "megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices"


def _other_settings(dataset: Any) -> str:
    """What the name of an index says of settings that are not the default."""
    config = dataset.config
    keeps_last = dataset.index_split.name == "valid" and not config.drop_last_partial_validation_sequence
    return ("-last" if keeps_last else "") + ("" if config.add_extra_token_to_sequence else "-noextra")


def _is_there(dataset: Any, digest: str) -> bool:
    name = f"{digest}-{type(dataset).__name__}-{dataset.index_split.name}-sample_index.npy"
    return os.path.isfile(os.path.join(dataset.config.path_to_cache, name))


def _build(original: Function) -> Function:
    @functools.wraps(original)
    def _build_document_sample_shuffle_indices(self: Any, *args: Any, **kwargs: Any) -> Any:
        digest = self.unique_description_hash + _other_settings(self)
        only_reads = getattr(self.config, "fast_cache_load", False) or getattr(
            self.config, "defer_npy_index_mmap", False
        )
        if not only_reads or _is_there(self, digest):
            self.unique_description_hash = digest
        return original(self, *args, **kwargs)

    return _build_document_sample_shuffle_indices


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BUILD: _build}
