"""The loss mask that GPTDataset keeps from one row for the next.

What is wrong (from 0.12 on): without eod_mask_loss and the two resets, GPTDataset keeps the loss mask of the first row
that it is asked for, and takes it for all later rows. The zeros for the padding of a row go into the mask that is kept.
Later rows are then not trained at these positions, in silence. Up to 0.14 the padding of every row stays in the mask,
until no target is left and the loss is 0, and all rows get the same tensor. From 0.15 on only that of the first row
does, because later rows get a copy. Each data worker has a mask of its own, so the rows that lose targets depend on the
number of workers.

What the patch does: it lets no row find a mask that another row has written to. Up to 0.14 each row gets a new mask of
ones, as a row that is copied from the cache would. From 0.15 on the mask that is kept is replaced once, behind the
first row. The attention mask and the positions are still kept. The files of indices and their names stay.

Upstream: open for the first row (Megatron-LM pull request 6981). 0.15 copies the mask for later rows.

Not covered: a dataset class with a __getitem__ of its own that does not call GPTDataset's. A data worker that is
spawned needs a call of shim, which `shim run` makes, or a worker_init_fn.

Delete when: every supported release keeps a mask that no row has written to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

GETITEM = "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__"


def _new_for_each_row(original: Function) -> Function:
    @functools.wraps(original)
    def __getitem__(self: Any, *args: Any, **kwargs: Any) -> Any:
        _renew(self)
        return original(self, *args, **kwargs)

    return __getitem__


def _new_behind_the_first_row(original: Function) -> Function:
    @functools.wraps(original)
    def __getitem__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.masks_and_position_ids_are_cached:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            _renew(self)

    return __getitem__


def _renew(dataset: Any) -> None:
    """Put a new mask in the place of the one that is kept. It is all ones: others are not kept."""
    if dataset.cached_loss_mask is not None:
        dataset.cached_loss_mask = torch.ones_like(dataset.cached_loss_mask)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {GETITEM: _new_for_each_row if variant == "v0_12" else _new_behind_the_first_row}
