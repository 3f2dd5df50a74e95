"""Proofs of te-flash-3-cp.

FlashAttention 3 needs a GPU. Here functions in torch stand for its forward and its backward, with its signatures. All
around them is Transformer Engine's own Python: DotProductAttention, the choice of the backend, and the ring of ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
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
from shim.testing.proof import CannotRunError, Here, proof
from shim.testing.transformer_engine import te_cuda_stand_ins


def future(q: Tensor, k: Tensor) -> Tensor:
    """The keys that a query does not see: both ends of rows [b, s, h, d] are aligned, as in FlashAttention."""
    return torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, None, None]:
    """FlashAttention 3 of rows [b, s, h, d]: the output, and logarithms of sums, [b, h, s]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    if causal:
        scores = scores.masked_fill(future(q, k), float("-inf"))
    output = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype).contiguous()
    return output, scores.logsumexp(-1), None, None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    scale: float, causal: bool,
) -> None:  # fmt: skip
    """The gradients of rows that are a part of a row with these sums, into dq, dk and dv."""
    grad, q, k, v, out = (part.float() for part in (grad, q, k, v, out))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        scores = scores.masked_fill(future(q, k), float("-inf"))
    shares = (scores - sums.unsqueeze(-1)).exp()
    own = (grad * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    moved = shares * (torch.einsum("bqhd,bkhd->bhqk", grad, v) - own) * scale
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", moved, k))
    dk.copy_(torch.einsum("bhqk,bqhd->bkhd", moved, q))
    dv.copy_(torch.einsum("bhqk,bqhd->bkhd", shares, grad))


# FlashAttention 3 before July 2025, and since.
def older_forward(q, k, v, *between, softmax_scale=None, causal=False, window_size=(-1, -1), num_splits=1):  # type: ignore[no-untyped-def]
    return forward(q, k, v, softmax_scale, causal)


def older_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, cu_q, cu_k, used_q, used_k, max_q, max_k, dq, dk, dv, softmax_scale=None,
    causal=False, window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)


def newer_forward(  # type: ignore[no-untyped-def]
    q, k, v, *between, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, num_splits=1
):
    return forward(q, k, v, softmax_scale, causal)


def newer_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, cu_q, cu_k, used_q, used_k, max_q, max_k, dq, dk, dv, softmax_scale=None,
    is_causal=False, window_size_left=-1, window_size_right=-1, deterministic=False,
):  # fmt: skip
    backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal)


APIS = {"older": (older_forward, older_backward), "newer": (newer_forward, newer_backward)}


def backends() -> Any:
    """The module with the functions of FlashAttention 3."""
    owner = import_module("transformer_engine.pytorch.attention")
    return import_module(f"{PACKAGE}.backends") if hasattr(owner, "__path__") else owner  # from 2.3, and 2.2


def own_api() -> str:
    """The API of FlashAttention 3 for which the installed Transformer Engine was written."""
    return "newer" if Version(import_module("transformer_engine").__version__) >= Version("2.14") else "older"


@contextlib.contextmanager
def flash_attention_3(api: str, flash_2: str | None) -> Iterator[Any]:
    """Transformer Engine's class of attention beside a FlashAttention 3 with this API and this FlashAttention 2."""
    module = backends()
    if not hasattr(module, "fa_utils"):
        raise CannotRunError("this release takes another FlashAttention 3")
    owner: Any = import_module("transformer_engine.pytorch.attention")
    utils: Any = module.fa_utils
    kernels: Any = import_module("transformer_engine_torch")
    backend = kernels.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    chooses = sys.modules[utils.__module__]
    answer = (backend, "a stand-in") if hasattr(chooses, "FusedAttentionParams") else backend
    found = {"v3_is_installed": True, "use_v3": True, "fa3_version": Version("3.0.0"), "v3_0_0_beta": False}
    version = Version(flash_2 or "0")
    flags = [name for name in vars(utils) if name.startswith("v2_") and name.endswith("plus")]
    found |= {name: version >= Version("2." + name[3:-4].replace("_", ".") + "0") for name in flags}
    found |= {"version": version, "is_installed": flash_2 is not None}
    functions = dict(zip(("_flash_attn_fwd_v3", "_flash_attn_bwd_v3"), APIS[api], strict=True))
    with contextlib.ExitStack() as undo:
        undo.enter_context(te_cuda_stand_ins((9, 0)))
        undo.enter_context(empty_caches())
        undo.enter_context(mock.patch.object(kernels, "get_fused_attn_backend", lambda *args, **kwargs: answer))
        for name, loaded in list(sys.modules.items()):
            if name.startswith("transformer_engine.pytorch") and "get_cudnn_version" in vars(loaded):
                undo.enter_context(mock.patch.object(loaded, "get_cudnn_version", lambda: CUDNN))
        for name, value in found.items():
            if name in vars(utils):
                undo.enter_context(mock.patch.object(utils, name, value))
        for name, function in functions.items():
            undo.enter_context(mock.patch.object(module, name, function, create=True))
        undo.enter_context(mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()))
        undo.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(OnGpu())
        yield owner.DotProductAttention


def error_of(api: str, flash_2: str | None, comm: str = "p2p") -> float:
    """The error of the output and the gradients of rows on this rank, in bf16, against attention in fp64."""
    group, rank, ranks = torch.distributed.group.WORLD, torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(LENGTH, BATCH, HEADS, HEAD, generator=generator).bfloat16() for _ in range(4)]
    *inputs, grad = (part.double() for part in whole)
    inputs = [part.requires_grad_() for part in inputs]
    q, k, v = (part.permute(1, 2, 0, 3) for part in inputs)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
    truth.backward(grad)
    own = own_tokens(rank, ranks)
    with flash_attention_3(api, flash_2) as attention:
        parallel = {"cp_group": group, "cp_global_ranks": list(range(ranks)), "cp_stream": torch.cuda.Stream()}
        layer = attention(HEADS, HEAD, attention_dropout=0.0, qkv_format="bshd", **parallel, cp_comm_type=comm)
        rows = [part[own].transpose(0, 1).contiguous().requires_grad_() for part in whole[:3]]
        found = layer(*rows)
        if comm != "p2p":  # its messages in backward need more than gloo
            found.backward(whole[3][own].transpose(0, 1).flatten(2))
    right = [truth.detach().flatten(2), *(part.grad for part in inputs)]
    ours = [found.detach(), *(part.grad for part in rows if part.grad is not None)]
    pairs: Any = zip(ours, right[: len(ours)], strict=True)
    errors = [(one.transpose(0, 1).double() - other[own]).norm() / other.norm() for one, other in pairs]
    return float(max(errors))


@proof(
    "attention off by {:.1e}", bound=2e-2, defect="crash", crashes=r"^IndexError: tuple index out of range",
    ranks=RANKS, te=True,
)  # fmt: skip
def flash_attention_3_without_2(here: Here) -> float:
    """FlashAttention 3 crashes under context parallelism if FlashAttention 2 is not installed.

    To reproduce, on Hopper with FlashAttention 3 alone: run `DotProductAttention` with bshd rows and NVTE_FUSED_ATTN=0
    on two context-parallel ranks with cp_comm_type="p2p". Here functions in torch stand for FlashAttention 3.

    The results are taken from places 4 and 5 if `FlashAttentionUtils.v2_7_0_plus` is False, which is about
    FlashAttention 2. FlashAttention 3 returns four results, the output and the logarithms of sums first. All kinds of
    context parallelism do so. Pull request 2825 fixed it in 2.16.
    """
    return max(here.run(error_of, own_api(), None, layout=Layout(cp=here.world)))


@proof(
    "attention off by {:.1e}", bound=2e-2, defect="crash", ranks=RANKS, te=True, variants=("v2_2", "v2_3"),
    crashes=r"^TypeError: newer_forward\(\) got an unexpected keyword argument 'window_size'",
)  # fmt: skip
def a_newer_flash_attention_3(here: Here) -> float:
    """Context parallelism calls FlashAttention 3 of July 2025 and later by names that it no longer takes.

    To reproduce, on Hopper with such a FlashAttention 3: run `DotProductAttention` with bshd rows and NVTE_FUSED_ATTN=0
    on two context-parallel ranks: "_flash_attn_forward() got an unexpected keyword argument 'window_size'". Here
    functions in torch, with its signatures, stand for FlashAttention 3.

    FlashAttention 3 takes `window_size_left` and `window_size_right` since then, and `is_causal` in backward. Pull
    request 2704 passes these from 2.14 on.
    """
    return max(here.run(error_of, "newer", "2.7.3", layout=Layout(cp=here.world)))
