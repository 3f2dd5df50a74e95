"""Proof of frozen-tied-embedding."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.testing.proof import Here, proof
from shim.testing.schedules import mean_of_row, run_microbatches

STEPS, LR = 3, 0.5


def training(**options: Any) -> list[float]:
    """The losses of some steps in which only adapters learn, on every rank. options: of the model.

    Rows run through the schedule of the release, and gradients through its finalize_model_grads.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    model: Any = testing.build_gpt(**{"mtp_num_layers": None, **options})
    adapters = testing.add_lora(model)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, 8), generator=generator) for _ in range(2)]
    found = []
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        logged = run_microbatches([wrapped], rows, mean_of_row, 8)
        with torch.no_grad():
            for weight in adapters:
                weight.sub_(LR * weight.main_grad)  # type: ignore[attr-defined]
        found.append(sum(float(one["loss"]) for one in logged))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    losses = torch.tensor(found if parallel_state.is_pipeline_last_stage() else [0.0] * STEPS, dtype=torch.float64)
    torch.distributed.broadcast(losses, last)
    return losses.tolist()


@proof(
    "losses of 3 steps off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^TypeError: Invalid function argument. Expected parameter `tensor` of type torch.Tensor",
)
def adapters_learn_on_two_pipeline_stages(here: Here) -> float:
    """LoRA on a model with tied embeddings crashes under pipeline parallelism.

    To reproduce: build a GPTModel with `share_embeddings_and_output_weights=True` on two pipeline stages, freeze all
    weights, add adapters, wrap it in DistributedDataParallel, and train one step with `finalize_model_grads`.

    `_allreduce_word_embedding_grads` sums the gradients of the first and of the last stage's copy of the embedding. A
    frozen one has no gradient, and the all-reduce of None raises a TypeError. Right are the losses of one stage.

    In 0.12. 0.13 leaves a frozen embedding out, by commit afb755f548.
    """
    truth = torch.tensor(here.run(training)[0])
    found = torch.tensor(here.run(training, layout=testing.Layout(pp=here.world), timeout=60))
    return float(((found - truth) / truth).abs().max())
