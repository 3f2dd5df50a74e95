"""Proofs of inference-mode-caches."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import CannotRunError, Here, proof

LENGTH = 16
CRASH = r"^RuntimeError: Inference tensors cannot be saved for backward"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gradients(evaluated: bool, **options: Any) -> Tensor:
    """All gradients of a step on one row, end to end, after an evaluation in inference mode or without one."""
    model = testing.build_gpt(mtp_num_layers=None, **options)
    row = torch.arange(LENGTH)[None]
    if evaluated:
        with torch.inference_mode():
            model.eval()(row, row, None, labels=row)
    model.train()(row, row, None, labels=row).mean().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def training_error() -> float:
    """How far the gradients with full recompute after an evaluation are from those without one."""
    truth = gradients(evaluated=False, **FULL)
    return float((gradients(evaluated=True, **FULL) - truth).norm() / truth.norm())


@proof("gradient off by {:.1e}", defect="crash", crashes=CRASH)
def a_recompute_after_an_evaluation_in_inference_mode(here: Here) -> float:
    """Training with full recompute crashes after an evaluation under torch.inference_mode() of the same row length.

    To reproduce: run a GPTModel with `position_embedding_type="rope"` and `recompute_granularity="full"` under
    `torch.inference_mode()`, then train it on rows of the same length: "Inference tensors cannot be saved for
    backward". The gradients should be those of a training without the evaluation.

    `RotaryEmbedding.forward` keeps its tables by length (`lru_cache`). A table that was made in inference mode is an
    inference tensor, and the checkpoint of the layers saves it. The same holds for `YarnRotaryEmbedding.forward`.
    """
    return here.run(training_error)[0]


def softmax_error(evaluated: bool = True) -> float:
    """The error of the gradient of scores in the unfused causal softmax, after an evaluation in inference mode."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    softmax = FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, False, attention_mask_func, True, None)
    scores = torch.randn(1, 2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2))
    if evaluated:
        with torch.inference_mode():
            softmax(scores.clone(), None)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    mine, true = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    (softmax(mine * 1.0, None) * weights).sum().backward()
    (true.masked_fill(later, -10000.0).softmax(-1) * weights).sum().backward()
    assert mine.grad is not None and true.grad is not None
    return float((mine.grad - true.grad).norm() / true.grad.norm())


@proof("gradient off by {:.1e}", bound=1e-6, defect="crash", crashes=CRASH, variants=("v0_12", "v0_13"))
def unfused_attention_after_an_evaluation_in_inference_mode(here: Here) -> float:
    """Unfused causal attention cannot be trained after an evaluation under torch.inference_mode() of the same length.

    To reproduce: run a `FusedScaleMaskSoftmax` with `AttnMaskType.causal`, without fusion and without a mask, under
    `torch.inference_mode()`, then on scores that require gradients: "Inference tensors cannot be saved for backward".

    `get_default_causal_mask` keeps its masks by length (`lru_cache`), and `masked_fill_` saves the mask. Up to 0.15;
    0.16 keeps no masks.
    """
    return here.run(softmax_error)[0]


def fused_table_error() -> float:
    """The error of gradients through the tables that fused MLA gets, after an evaluation in inference mode."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    embeddings: list[Any] = [YarnRotaryEmbedding(8, original_max_position_embeddings=LENGTH // 2)]
    if hasattr(RotaryEmbedding, "get_cached_cos_sin"):  # from 0.20
        embeddings.append(RotaryEmbedding(8, 1.0))
    worst = 0.0
    for embedding in embeddings:
        with torch.inference_mode():
            embedding.get_cached_cos_sin(LENGTH, dtype=torch.float32)
        cos, sin = embedding.get_cached_cos_sin(LENGTH, dtype=torch.float32)
        x = torch.ones(LENGTH, 1, 1, 8, requires_grad=True)
        (x * cos + x * sin).sum().backward()
        assert x.grad is not None
        made = embedding(LENGTH)
        freqs, mscale = made if isinstance(made, tuple) else (made, 1.0)
        truth = (freqs.cos() + freqs.sin()) * mscale
        worst = max(worst, float((x.grad - truth).norm() / truth.norm()))
    return worst


@proof("gradient off by {:.1e}", bound=1e-6, defect="crash", crashes=CRASH)
def fused_mla_after_an_evaluation_in_inference_mode(here: Here) -> float:
    """Fused MLA cannot be trained after an evaluation under torch.inference_mode() that made its tables.

    To reproduce: make a `YarnRotaryEmbedding`, call `get_cached_cos_sin` under `torch.inference_mode()` for a row that
    is longer than `original_max_position_embeddings`, or for another dtype, as attention does with
    `config.apply_rope_fusion`. Call it again in training, and multiply by what it returns: "Inference tensors cannot
    be saved for backward". Here a product stands for the fused kernel, which needs a GPU and saves both tables.

    `_set_cos_sin_cache` keeps both by length and dtype. From 0.20 on `RotaryEmbedding` has the same method.
    """
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    if not hasattr(YarnRotaryEmbedding, "get_cached_cos_sin"):
        raise CannotRunError("this release has no fused MLA")
    return here.run(fused_table_error)[0]


def permuted_error() -> float:
    """The error of a gradient through the order of heads of gated delta net, after an evaluation in inference mode."""
    from megatron.core.ssm.gated_delta_net import common

    arguments: Any = ((4, 4, 8), 2, torch.device("cpu"))
    with torch.inference_mode():
        common._build_head_perm_for_split_sections(*arguments)
    order = common._build_head_perm_for_split_sections(*arguments)
    x, weights = torch.ones(LENGTH, requires_grad=True), torch.arange(LENGTH, dtype=torch.float32)
    (x.index_select(-1, order) * weights).sum().backward()
    # Each of two ranks has half of every section.
    first = torch.tensor([0, 1, 4, 5, 8, 9, 10, 11])
    truth = torch.empty(LENGTH).index_copy(0, torch.cat([first, torch.tensor([2, 3, 6, 7, 12, 13, 14, 15])]), weights)
    assert x.grad is not None
    return float((x.grad - truth).norm() / truth.norm())


@proof("gradient off by {:.1e}", defect="crash", crashes=CRASH, variants=("v0_19", "v0_20"))
def gated_delta_net_after_an_evaluation_in_inference_mode(here: Here) -> float:
    """Gated delta net under context parallelism cannot be trained after an evaluation under torch.inference_mode().

    To reproduce: call `_build_head_perm_for_split_sections` of megatron.core.ssm.gated_delta_net under
    `torch.inference_mode()`, as GatedDeltaNet does under context parallelism. Call it again in training and give what
    it returns to `index_select`, as the layer does: "Inference tensors cannot be saved for backward".

    The order of heads is kept by sections, ranks and device (`lru_cache`), for any length of rows. New in 0.19.
    """
    try:
        import_module("megatron.core.ssm.gated_delta_net.common")
    except ModuleNotFoundError as error:
        raise CannotRunError("this release keeps no order of heads") from error
    return here.run(permuted_error)[0]
