"""Proof of interleaved-shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from shim.patches.megatron_core._proof_pipelines import losses_on_rank
from shim.testing import Layout
from shim.testing.proof import Here, proof

VARIABLE = {"variable_seq_lengths": True}
LENGTHS = (6, 10)  # tokens of the microbatches, as many as pipeline ranks
PATIENCE = 20.0  # seconds that a stage waits for a message


class _Impatient:
    """A message under way that is waited for some seconds only."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=PATIENCE))
        except RuntimeError as error:
            raise TimeoutError("two stages wait for each other") from error


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    batch = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", lambda ops: [_Impatient(work) for work in batch(ops)]):
        yield


def losses_or_hang(lengths: Sequence[int], options: dict[str, Any]) -> list[float]:
    """The losses of the microbatches of one step; none on stages without them. TimeoutError if it hangs."""
    with impatient():
        return losses_on_rank(lengths, options, 1)


@proof(
    "losses off by {:.1e}",
    bound=1e-6,
    ranks=2,
    defect="hang",
    crashes=r"^TimeoutError: two stages wait for each other",
)
def as_many_rows_of_different_lengths_as_stages(here: Here) -> float:
    """The interleaved schedule hangs with `variable_seq_lengths` and as many microbatches as pipeline ranks.

    To reproduce: over gloo, train a model on two pipeline ranks of two virtual stages each, with
    `variable_seq_lengths` and two microbatches, and without `overlap_p2p_comm`, as TransformerConfig has it by default.

    The first rank runs all its forward passes in the warm-up. It sends the last output, and asks for the first gradient
    afterwards. The second rank sends that gradient and receives that output in one call of `_communicate`, which first
    exchanges the shapes of both. It waits until the shape of the gradient is received, and the first rank until its
    output is. Right would be to send the last output and receive the first gradient in one call, as ranks do that have
    passes behind the warm-up. From 0.12 on.
    """
    (truth,) = here.run(losses_on_rank, LENGTHS, VARIABLE, 1)
    found = here.run(losses_or_hang, LENGTHS, VARIABLE, layout=Layout(pp=2, vp=2))[-1]
    return max(abs(mine - true) / true for true, mine in zip(truth, found, strict=True))
