"""Proofs of te-cu-seqlens-cache.

The kernels need a GPU. Here a function in torch stands for cuDNN's fused attention. All around it is Transformer
Engine's own Python: DotProductAttention, the choice of the backend, the autograd function that saves the offsets, and
the ring of ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.transformer_engine._proof_attention import (
    BATCH,
    CUDNN,
    HEAD,
    HEADS,
    LENGTH,
    PACKAGE,
    RANKS,
    OnGpu,
    empty_caches,
    own_tokens,
)
from shim.testing.layout import Layout
from shim.testing.proof import Here, proof

CRASH = r"^RuntimeError: Inference tensors cannot be saved for backward"


def dense_attention(
    *, q: Tensor, k: Tensor, v: Tensor, attn_scale: float, attn_mask_type: str, **others: Any
) -> tuple[Tensor, list[Tensor]]:
    """cuDNN's attention of rows q, k and v, [s, b, h, d]: the output, and in fp32 logarithms of sums, [b, h, s, 1]."""
    scores = torch.einsum("qbhd,kbhd->bhqk", q.float(), k.float()) * attn_scale
    if "causal" in attn_mask_type:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf"))
    output = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v.float()).to(q.dtype).contiguous()
    return output, [scores.logsumexp(-1, keepdim=True), torch.empty(0)]


def called_by_name(original: Any) -> Any:
    """dense_attention for this function of Transformer Engine, which is called by position in some releases."""
    bind = inspect.signature(original).bind
    return lambda *args, **kwargs: dense_attention(**bind(*args, **kwargs).arguments)


@contextlib.contextmanager
def fused_attention() -> Iterator[Any]:
    """Transformer Engine's class of attention, with dense_attention for cuDNN's."""
    owner = ring = backends = utils = import_module("transformer_engine.pytorch.attention")
    if hasattr(owner, "__path__"):  # from 2.3
        names = ("dot_product_attention", "context_parallel", "backends", "utils")
        owner, ring, backends, utils = (import_module(f"{PACKAGE}.{name}") for name in names)
    kernels: Any = import_module("transformer_engine_torch")
    backend = kernels.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    answer = (backend, "") if hasattr(utils, "FusedAttentionParams") else backend  # from 2.20
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(kernels, "get_fused_attn_backend", lambda *args, **kwargs: answer))
        for name, module in list(sys.modules.items()):
            if name.startswith("transformer_engine.pytorch") and "get_cudnn_version" in vars(module):
                undo.enter_context(mock.patch.object(module, "get_cudnn_version", lambda: CUDNN))
        for module in {id(module): module for module in (ring, backends)}.values():
            undo.enter_context(mock.patch.object(module, "fused_attn_fwd", called_by_name(module.fused_attn_fwd)))
        undo.enter_context(mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()))
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(empty_caches())
        undo.enter_context(OnGpu())
        yield owner.DotProductAttention  # type: ignore[attr-defined, unused-ignore]


def trained_after_evaluation(evaluated: bool = True) -> float:
    """The error of the output of a training forward, after an evaluation in inference mode or without one."""
    group = torch.distributed.group.WORLD
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(LENGTH, BATCH, HEADS, HEAD, generator=generator).bfloat16() for _ in range(3)]
    q, k, v = (part.double().permute(1, 2, 0, 3) for part in whole)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    own = own_tokens(rank, ranks)
    with fused_attention() as attention:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            parallel = {"cp_group": group, "cp_global_ranks": list(range(ranks)), "cp_stream": torch.cuda.Stream()}
            layer = attention(HEADS, HEAD, attention_dropout=0.0, **(parallel if ranks > 1 else {}))
        if evaluated:
            with torch.inference_mode():
                layer.eval()(*(part[own] for part in whole))
        found = layer.train()(*(part[own].requires_grad_() for part in whole))
    return float((found.detach() - truth[own]).norm() / truth.norm())


@proof("attention off by {:.1e}", bound=1e-2, defect="crash", crashes=CRASH, te=True, variants=("v2_0", "v2_2", "v2_3"))
def training_after_an_evaluation_in_inference_mode(here: Here) -> float:
    """Training crashes after an evaluation under torch.inference_mode() whose rows have the same shape.

    To reproduce: run `DotProductAttention` with FusedAttention and sbhd rows under `torch.inference_mode()`, then with
    rows of the same shape that require gradients: "Inference tensors cannot be saved for backward". Here a function in
    torch stands for cuDNN's kernel, which needs a GPU.

    `get_full_cu_seqlens` keeps the offsets of full rows by (batch_size, max_seqlen) alone. Those that were made in
    inference mode are inference tensors, and FusedAttnFunc saves them. Offsets of another device are returned as well.
    Pull request 2728 fixed it in 2.16.
    """
    return here.run(trained_after_evaluation)[0]


@proof(
    "attention off by {:.1e}",
    bound=1e-2,
    defect="crash",
    crashes=CRASH,
    ranks=RANKS,
    te=True,
    variants=("v2_2", "v2_3", "v2_16"),
)
def context_parallel_training_after_an_evaluation(here: Here) -> float:
    """Training under context parallelism crashes after an evaluation under torch.inference_mode() in the same shape.

    To reproduce: run `DotProductAttention` with FusedAttention, sbhd rows and cp_comm_type="p2p" on two ranks under
    `torch.inference_mode()`, then with rows of the same shape that require gradients: "Inference tensors cannot be
    saved for backward". Here a function in torch stands for cuDNN's kernel, which needs a GPU.

    `_get_cu_seqlens_info_with_cp` keeps each rank's share of the offsets by (batch_size, max_seqlen, cp_size) alone,
    also in releases that have fixed `get_full_cu_seqlens`. Open in 2.20.
    """
    return max(here.run(trained_after_evaluation, layout=Layout(cp=here.world)))
