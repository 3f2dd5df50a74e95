"""Proofs of mtp-loss-cp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout, PackedRow
from shim.testing.proof import Here, proof

TOKENS = 32


def row_with_targets(*places: int) -> PackedRow:
    """A row of one sequence of TOKENS tokens, whose loss mask is one at `places` alone."""
    mask = torch.zeros(TOKENS)
    mask[list(places)] = 1
    return testing.pack(testing.random_sequences([TOKENS]), loss_masks=[mask])


def places_of_rank(row: PackedRow) -> Tensor:
    """The places in the row that this context-parallel rank has: of each sequence a chunk from both ends."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    places = torch.arange(row.total)
    if size == 1:
        return places
    slots = [slot.chunk(2 * size) for slot in places.tensor_split(list(row.ends[:-1])) if len(slot)]
    return torch.cat([chunks[each] for chunks in slots for each in (rank, -1 - rank)])


def wrapped_model(**options: Any) -> Any:
    """A GPTModel with multi-token prediction for the initialised layout, in DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    model: Any = testing.build_gpt(num_layers=1, mtp_loss_scaling_factor=1.0, **options)
    model.config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def step(wrapped: Any, row: PackedRow, packed: bool = False, with_mask: bool = True) -> None:
    """A step of the release's schedule on one row, with the sums over ranks. The main loss is that of the whole row.

    packed: whether the model gets PackedSeqParams. with_mask: whether it gets the loss mask.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    per_token, places, valid = wrapped.config.calculate_per_token_loss, places_of_rank(row), row.valid.float()[None]
    mask = row.loss_mask if with_mask else valid
    # 0.12 sums the count of a per-token loss over data-parallel ranks alone, so it wants that of the row.
    counted = mask if testing.release().startswith("0.12.") else mask[:, places]

    def loss_func(losses: Tensor) -> tuple[Any, ...]:
        summed = (losses * mask[:, places]).sum()
        return (summed, counted.sum().int(), {}) if per_token else (summed / mask.sum().clamp(min=1), {})

    def forward_step(data: Iterator[None], chunk: Any) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {"packed_seq_params": row.packed_seq_params()} if packed else {}
        if with_mask:
            given["loss_mask"] = mask[:, places]
        inputs = (of_row[:, places] for of_row in (row.input_ids, row.position_ids, row.labels))
        tokens, positions, labels = inputs
        return chunk(tokens, positions, None, labels=labels, **given), loss_func

    wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([None]),
        model=wrapped,
        num_microbatches=1,
        seq_length=row.total,
        micro_batch_size=1,
        forward_only=False,
    )


def logged_losses() -> Tensor:
    """The loss of each depth that the release logs, as its own reduction over ranks makes it. Clears them."""
    import torch.distributed as dist
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: Any = MTPLossLoggingHelper.tracker
    values = [tracker[name] for name in ("values", "loss_values", "loss_sums") if name in tracker]  # 0.19, dev
    counts = [tracker["num_tokens"]] if "num_tokens" in tracker else []  # dev, with per-token loss
    group, logged = tracker["avg_group"], torch.stack([*values, *counts])
    dist.all_reduce(logged, group=group)  # gloo has no average
    tracker.clear()
    return logged[0] / (logged[1].clamp(min=1) if counts else group.size())


def gradient(*places: int, **options: Any) -> Tensor:
    """The gradient of the weights of multi-token prediction after a step, in one vector of fp64."""
    wrapped = wrapped_model(**options)
    step(wrapped, row_with_targets(*places))
    logged_losses()
    named = wrapped.module.named_parameters()
    return torch.cat([weight.main_grad.double().flatten() for name, weight in named if name.startswith("mtp.")])


def off_by(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@proof("MTP gradient off by {:.1e}", bound=5e-6, ranks=2)
def targets_at_the_end_of_a_row_train_like_on_one_rank(here: Here) -> float:
    """Context parallelism trains multi-token prediction on another loss than one rank.

    To reproduce: build a GPTModel with `mtp_num_layers=1` in DistributedDataParallel. Run a step of
    `get_forward_backward_func()` with `finalize_model_grads` on a row of 32 tokens whose loss mask is one in the last
    10 alone, as in supervised fine-tuning, with a main loss that is divided by the count of the whole row. Do the same
    on two ranks with `context_parallel_size=2`, where each has a chunk from both ends. The gradients of the multi-token
    prediction layer are others.

    The masked losses of a rank are divided by the number of targets that this rank has, and gradients are averaged over
    the ranks. So a target counts more on the rank that has fewer of them. Right is to divide by the count of the whole
    row, as the main loss is.

    In every release from 0.12 to 0.20. Megatron-LM pull request 7498 is open; see also issue 7452 and mcore-bridge
    issue 104.
    """
    places = range(TOKENS - 10, TOKENS)
    truth: Tensor = here.run(gradient, *places)[0]
    return max(off_by(found, truth) for found in here.run(gradient, *places, layout=Layout(cp=here.world)))


@proof("logged loss off by {:.1e}", bound=5e-6, ranks=2)
def a_rank_without_targets_adds_nothing_to_the_loss(here: Here) -> float:
    """A context-parallel rank without targets spoils the loss of multi-token prediction.

    To reproduce: as above, with a loss mask that is one in the last 6 of 32 tokens alone. Two ranks then have all
    targets on one of them. Compare the loss in MTPLossLoggingHelper.tracker, averaged over its `avg_group`, with that
    of one rank.

    Up to 0.16 the rank without targets divides zero by zero, and every loss and every gradient is NaN. From 0.17 on it
    adds zero to a mean over ranks, so the loss and its gradient are half of what they are on one rank. Right is the
    loss of one rank.
    """
    places = range(TOKENS - 6, TOKENS)
    truth: Tensor = here.run(logged, *places)[0]
    return max(off_by(found, truth) for found in here.run(logged, *places, layout=Layout(cp=here.world)))


def logged(*places: int) -> Tensor:
    step(wrapped_model(), row_with_targets(*places))
    return logged_losses()
