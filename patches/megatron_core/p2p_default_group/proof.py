"""Proofs of p2p-default-group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof
from shim.testing.schedules import mean_of_row, run_microbatches

LENGTHS = 6, 10, 8, 4  # tokens of the microbatches
PATIENCE = 3.0  # seconds that a rank waits for the others of its group


@contextlib.contextmanager
def communicators_made_by_the_first_batch() -> Iterator[None]:
    """Let the first batch of messages over a group wait for all its ranks, as NCCL does, which makes a communicator.

    The default group has its communicator: a trainer has met all ranks before.
    """
    batch, made = dist.batch_isend_irecv, {dist.group.WORLD}

    def first_waits(ops: list[Any]) -> list[Any]:
        group = ops[0].group or dist.group.WORLD
        if group not in made:
            try:
                dist.monitored_barrier(group=group, timeout=timedelta(seconds=PATIENCE))
            except RuntimeError as error:
                raise TimeoutError("not every rank of the group sends or receives in its first batch") from error
            made.add(group)
        works: list[Any] = batch(ops)
        return works

    with mock.patch.object(dist, "batch_isend_irecv", first_waits):
        yield


def losses_on_rank(layers: int) -> list[float]:
    """The loss of each microbatch in a step of the release's schedule; none on stages without it."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, length), generator=generator) for length in LENGTHS]
    model = testing.build_gpt(
        num_layers=layers,
        mtp_num_layers=None,
        share_embeddings_and_output_weights=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that upstream allows with it
    )
    return [float(each["loss"]) for each in run_microbatches(model, rows, mean_of_row, max(LENGTHS))]


def losses_of_lazy_groups(layers: int) -> list[float]:
    with communicators_made_by_the_first_batch():
        return losses_on_rank(layers)


@proof(
    "losses off by {:.1e}",
    bound=1e-6,
    ranks=3,
    defect="hang",
    crashes=r"^TimeoutError: not every rank of the group sends or receives in its first batch",
)
def rows_of_different_lengths_pass_three_stages(here: Here) -> float:
    """The first step hangs with `variable_seq_lengths` on more than two pipeline stages.

    To reproduce: train a model on three pipeline ranks with `variable_seq_lengths`, over NCCL, without having used the
    pipeline group before. Over gloo, let `torch.distributed.batch_isend_irecv` wait for all ranks of a group in the
    first batch over it: torch documents that they must all take part, because NCCL makes the communicator then.

    Each stage sends a shape over the default group, and then its tensor over the pipeline group. The first two stages
    come to their first tensor, and wait for the third one to make the communicator of the pipeline group. The third one
    waits for a shape, which the second one is to send after that. With two stages all is well. Right would be to send
    shapes over the pipeline group: then the first batch is that of the shapes, in which every stage takes part. From
    0.12 to 0.15; fixed in 0.16 (Megatron-LM commit 5b322e5f85).
    """
    (truth,) = here.run(losses_on_rank, here.world)
    found = here.run(losses_of_lazy_groups, here.world, layout=Layout(pp=here.world))[-1]
    return max(abs(mine - true) / true for true, mine in zip(truth, found, strict=True))
