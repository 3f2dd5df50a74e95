"""The schedule that a release chooses for a layout: one process alone, 1F1B, or the interleaved one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["mean_of_row", "run_microbatches"]

Microbatch = TypeVar("Microbatch")


def run_microbatches(
    model: nn.Module | Sequence[nn.Module],
    microbatches: Sequence[Microbatch],
    forward: Callable[[Microbatch, Any], tuple[Tensor, Any]],
    length: int,
) -> list[dict[str, Any]]:
    """Run forward and backward passes of microbatches on this rank; return the log of its loss function for each.

    model: a model, or a rank's virtual stages of it (`build_chunks`). forward: of a microbatch and a stage, its output
    and its loss function, as upstream's forward_step_func returns them. length: tokens of the longest microbatch. Each
    microbatch has one row. Stages without a loss log nothing.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Any]:
        return forward(next(data), chunk)

    chunks = [model] if isinstance(model, nn.Module) else list(model)
    data = [iter(microbatches) for _ in chunks]
    logged: list[dict[str, Any]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )
    return logged


def mean_of_row(row: Tensor, chunk: Any) -> tuple[Tensor, Any]:
    """The forward pass of a row of token ids [1, n] whose loss is the mean over its tokens, for `run_microbatches`."""
    losses = chunk(row, torch.arange(row.numel())[None], None, labels=row.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})
