"""Proofs of mtp-embedding-marks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.cpu import optimizer_on_cpu
from shim.testing.proof import Here, proof
from shim.testing.schedules import mean_of_row, run_microbatches

LR, EMBEDDING_LR = 1e-3, 5e-4


class Extension:
    """What the extension of Apex does: it adds the gradient of a linear layer to main_grad."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """rows: [tokens, in], grad: [tokens, out], main_grad: [out, in]."""
        main_grad.add_(grad.flatten(0, -2).t() @ rows.flatten(0, -2))


def wrapped_stage(**options: Any) -> Any:
    """The model of this pipeline stage, with DistributedDataParallel around it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    model: Any = testing.build_gpt(mtp_num_layers=1, pipeline_model_parallel_size=stages, **options)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def gradient_of_embeddings(fused: bool, microbatches: int = 2, **options: Any) -> Tensor | None:
    """The gradient of this stage's embeddings in a step, after the sum over stages; None if it has none.

    fused: the output layer adds its own to main_grad.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.tensor_parallel import layers

    whole = wrapped_stage(**options)
    if whole.module.post_process:
        whole.module.output_layer.gradient_accumulation_fusion = fused
    whole.zero_grad_buffer()
    rows = [torch.arange(first, first + 8)[None] for first in range(microbatches)]
    with mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", Extension, create=True):
        run_microbatches(whole, rows, mean_of_row, 8)
    finalize_model_grads([whole])
    embedding = getattr(whole.module, "embedding", None)
    return None if embedding is None else embedding.word_embeddings.weight.main_grad.clone()


def error_over_stages(here: Here, stages: int, **options: Any) -> float:
    """How far the gradients of all copies are from that on one stage without fused accumulation, of its norm."""
    truth: Tensor = here.run(gradient_of_embeddings, False)[0]
    found = here.run(gradient_of_embeddings, True, layout=Layout(pp=stages), **options)
    return max(float((grad - truth).norm() / truth.norm()) for grad in found if grad is not None)


@proof("gradient off by {:.1e}", right="it is that of one stage", bound=5e-6, ranks=2)
def embeddings_of_mtp_keep_their_gradient_beside_a_fused_output_layer(here: Here) -> float:
    """gradient_accumulation_fusion drops the gradient of MTP's embeddings if they are tied, on the last stage of many.

    To reproduce: on two pipeline stages build a GPTModel with `mtp_num_layers=1`, tied embeddings and
    `gradient_accumulation_fusion=True`, wrap it in DistributedDataParallel, and run a step with `finalize_model_grads`.
    Compare `embedding.word_embeddings.weight.main_grad` with that of one stage. Here the kernel of Apex is a function
    in torch.

    The last stage's copy is also the weight of the output layer, which adds to main_grad itself, so that
    DistributedDataParallel drops what autograd has: the gradient of the rows that MTP has looked up. Upstream marks
    the weight with `zero_out_wgrad`, which keeps it, on one pipeline stage only. Right is the gradient of one stage.

    From 0.12 on.
    """
    return error_over_stages(here, 2)


def learning_rate_of_embeddings(**settings: Any) -> float:
    """The largest learning rate of the optimizer for this stage's embeddings."""
    from megatron.core.optimizer import OptimizerConfig

    whole = wrapped_stage()
    rates = {"lr": LR, "min_lr": 0.0, "decoupled_lr": EMBEDDING_LR, "decoupled_min_lr": 0.0}
    config = OptimizerConfig(optimizer="adam", **{**rates, **settings})
    weight = whole.module.embedding.word_embeddings.weight
    groups = optimizer_on_cpu(config, [whole]).param_groups
    return next(group["max_lr"] for group in groups if any(entry is weight for entry in group["params"]))


@proof(
    "{:.1f} times the learning rate asked for",
    right="all copies have decoupled_lr",
    variants=["v0_12"],
    bound=1.0,
    ranks=2,
)
def a_copy_of_the_embeddings_has_their_learning_rate(here: Here) -> float:
    """With decoupled_lr the copy of the embeddings for MTP is trained with another learning rate than the embeddings.

    To reproduce: on two pipeline stages build a GPTModel with `mtp_num_layers=1`, and an optimizer with `lr=1e-3` and
    `decoupled_lr=5e-4`. Look up the parameter group of `embedding.word_embeddings.weight` on both stages.

    `max_lr` is 5e-4 on the first stage and 1e-3 on the last, whose copy lacks `is_embedding_or_output_parameter`. The
    two are one weight of the model and get the same gradient, but differ from the first step on. Right is 5e-4 on both.

    From 0.12 to 0.17. Megatron-LM pull request 5034 fixes it in 0.18, where it speaks of Muon's buffers.
    """
    rates = here.run(learning_rate_of_embeddings, layout=Layout(pp=2))
    return max(rate / EMBEDDING_LR for rate in rates)
