"""Proof of mtp-overlapped-gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof
from shim.testing.schedules import mean_of_row, run_microbatches


def gradient_of_embeddings(overlapped: bool, steps: int = 2, microbatches: int = 2, **sums: Any) -> Tensor | None:
    """The gradient of this stage's embeddings in the last of some steps, after the sum over stages; None without any.

    sums: for the config of DistributedDataParallel.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    model: Any = testing.build_gpt(mtp_num_layers=1, pipeline_model_parallel_size=stages)
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlapped, **sums)
    whole = DistributedDataParallel(model.config, ddp, model)
    model.config.no_sync_func = whole.no_sync if overlapped else None
    rows = [torch.arange(first, first + 8)[None] for first in range(microbatches)]
    for _ in range(steps):
        whole.zero_grad_buffer()
        run_microbatches(whole, rows, mean_of_row, 8)
        finalize_model_grads([whole])
    embedding = getattr(model, "embedding", None)
    return None if embedding is None else embedding.word_embeddings.weight.main_grad.clone()


def error_over_stages(here: Here, **sums: Any) -> float:
    """How far the gradients of both stages' copies are from that on one stage, of its norm."""
    truth: Tensor = here.run(gradient_of_embeddings, False)[0]
    found = here.run(gradient_of_embeddings, True, layout=Layout(pp=2), **sums)
    return max(float((grad - truth).norm() / truth.norm()) for grad in found if grad is not None)


@proof(
    "gradient off by {:.1e}",
    right="it is that of one stage",
    bound=5e-6,
    ranks=2,
    defect="crash",
    crashes=r"^AssertionError",
)
def two_steps_of_mtp_with_overlapped_sums(here: Here) -> float:
    """overlap_grad_reduce fails with multi-token prediction if embeddings are tied over pipeline stages.

    To reproduce: on two pipeline stages build a GPTModel with `mtp_num_layers=1` and tied embeddings, wrap it in
    DistributedDataParallel with `overlap_grad_reduce=True`, and run two steps with `finalize_model_grads`.

    `output_layer.weight` of the last stage is a weight that no step uses, because its logits are made with
    `embedding.word_embeddings.weight`. Its bucket waits for a gradient that never comes. Up to 0.15 the first step ends
    with "Communication call has not been issued for this bucket", from 0.16 on `zero_grad_buffer` of the second fails
    in an assertion without a message. Right is the gradient of one stage.

    From 0.12 on.
    """
    return error_over_stages(here)
