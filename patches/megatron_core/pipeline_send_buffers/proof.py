"""Proofs of pipeline-send-buffers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, Measured, proof
from shim.testing.schedules import mean_of_row, run_microbatches

TOKENS, MICROBATCHES, STEPS, RATE = 8, 4, 4, 0.1
LATENCY = 0.02  # seconds until a message leaves for which nobody waits


class Send:
    """The work of an isend. It keeps the tensor that it was given, as those of torch do, and its address."""

    def __init__(self, isend: Callable[..., Any], tensor: Tensor, dst: int, group: Any) -> None:
        self.isend, self.tensor, self.dst, self.group = isend, tensor, dst, group
        self.address, self.shape, self.dtype = tensor.data_ptr(), tensor.shape, tensor.dtype
        self.wanted, self.left = threading.Event(), threading.Event()

    def leave(self) -> None:
        """Send what stands at the address: other numbers, where the tensor has given that memory away."""
        self.wanted.wait(LATENCY)
        sent = self.tensor.detach()
        if sent.data_ptr() != self.address:
            sent = torch.linspace(-1, 1, self.shape.numel(), dtype=self.dtype).reshape(self.shape)
        self.isend(sent, dst=self.dst, group=self.group).wait()
        self.left.set()

    def wait(self) -> None:
        self.wanted.set()
        if not self.left.wait(60):
            raise TimeoutError("the message has not left")


@contextlib.contextmanager
def late_messages() -> Iterator[None]:
    """Let torch.distributed.isend read the tensor some time after the call, as it may, in the order of the calls."""
    isend, waiting = dist.isend, queue.SimpleQueue[Send | None]()

    def late_isend(tensor: Tensor, dst: int, group: Any = None) -> Send:
        send = Send(isend, tensor, dst, group)
        waiting.put(send)
        return send

    def deliver() -> None:
        while (send := waiting.get()) is not None:
            send.leave()

    thread = threading.Thread(target=deliver, daemon=True)
    thread.start()
    try:
        with mock.patch.object(dist, "isend", late_isend):
            yield
    finally:
        waiting.put(None)
        thread.join(60)


def chunks(**options: Any) -> list[Any]:
    """The stages of this rank, of a model of 4 layers."""
    common: dict[str, Any] = {"num_layers": 4, "mtp_num_layers": None, "share_embeddings_and_output_weights": False}
    return testing.build_chunks(**common, batch_p2p_comm=False, overlap_p2p_comm=True, **options)


def step(model: list[Any]) -> float:
    """The loss of a step of the interleaved schedule with its update; zero on stages without the loss."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, TOKENS), generator=generator) for _ in range(MICROBATCHES)]
    logged = run_microbatches(model, rows, mean_of_row, TOKENS)
    with torch.no_grad():
        for weight in (weight for chunk in model for weight in chunk.parameters()):
            weight -= RATE * weight.grad
            weight.grad = None
    return sum(float(each["loss"]) for each in logged) / MICROBATCHES


def losses_on_rank(warmup_flush: bool) -> tuple[list[float], list[float]]:
    """Losses of some steps, without and with outputs that are freed."""
    curves = []
    for freed in (False, True):
        model = chunks(overlap_p2p_comm_warmup_flush=warmup_flush, deallocate_pipeline_outputs=freed)
        with late_messages():
            curves.append([step(model) for _ in range(STEPS)])
    return curves[0], curves[1]


def compared(here: Here, warmup_flush: bool) -> Measured:
    found = here.run(losses_on_rank, warmup_flush, layout=Layout(pp=here.world, vp=2))
    truth, measured = found[-1]
    off = [abs(mine - true) / true for true, mine in zip(truth, measured, strict=True)]
    return Measured(float(torch.tensor(off).max()), {"truth": truth, "measured": measured})


@proof("losses off by {:.1e}", right="bit-equal", ranks=2)
def an_output_is_kept_until_it_is_sent(here: Here) -> Measured:
    """A pipeline stage frees its output before it is sent.

    To reproduce: train a model on two pipeline ranks of two virtual stages, with `overlap_p2p_comm`,
    `batch_p2p_comm=False` and `deallocate_pipeline_outputs`. Let `torch.distributed.isend` take its time: it may read
    the tensor at any moment until its work has been waited for. Compare the losses with those without
    `deallocate_pipeline_outputs`.

    In the steady state the schedule starts to send an output, and `deallocate_output_tensor` frees it before the work
    is waited for. The next stage gets what stands in the memory by then. The work keeps a reference to the tensor, but
    `out.data = ...` takes the memory away from that tensor. Right would be to keep it until the message has left. From
    0.12 to 0.17; fixed in 0.18 (Megatron-LM pull request 4047).
    """
    return compared(here, warmup_flush=False)


@proof("losses off by {:.1e}", right="bit-equal", ranks=2)
def an_output_of_the_warm_up_is_kept_until_it_is_sent(here: Here) -> Measured:
    """A pipeline stage also frees its output before it is sent in the warm-up, with `overlap_p2p_comm_warmup_flush`.

    To reproduce: as above, with `overlap_p2p_comm_warmup_flush`.

    Then the schedule sends the outputs of the warm-up in the same way, and frees them before their works are waited
    for. From 0.12 to 0.17; fixed in 0.18 (Megatron-LM pull request 4047).
    """
    return compared(here, warmup_flush=True)
