"""Proof of max-logit-graph."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from shim.testing.proof import CannotRunError, Here, LacksFeatureError, proof

STEPS, TOKENS, BATCH, HEADS, HEAD = 4, 6, 2, 2, 4


class Resource:
    """What a fused attention keeps on its autograd node, such as quantizers and auxiliary tensors."""


class FusedAttention(torch.autograd.Function):
    """In the shape of Transformer Engine's: the output [s, b, h * d], and the largest logit of each head, [h]."""

    kept: ClassVar[list[weakref.ref[Resource]]] = []

    @staticmethod
    def forward(ctx: Any, query: Tensor) -> tuple[Tensor, Tensor]:
        ctx.kept = Resource()
        FusedAttention.kept.append(weakref.ref(ctx.kept))
        ctx.shape = query.shape
        return query.flatten(2).clone(), query.amax((0, 1, 3))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].view(ctx.shape)


def attention() -> Any:
    """megatron-core's TEDotProductAttention, with the attributes that its forward reads."""
    extensions = import_module("megatron.core.extensions.transformer_engine")
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "log_max_attention_logit" not in TransformerConfig.__dataclass_fields__:
        raise LacksFeatureError("this release does not log the largest attention logit")
    if not extensions.is_te_min_version("2.9.0"):
        raise CannotRunError("Transformer Engine gives the largest attention logit from 2.9 on")
    layer = extensions.TEDotProductAttention.__new__(extensions.TEDotProductAttention)
    torch.nn.Module.__init__(layer)
    config = SimpleNamespace(qk_clip=False, log_max_attention_logit=True, window_size=None)
    values = {"config": config, "te_forward_mask_type": True, "qkv_format": "sbhd", "num_splits": None}
    for name, value in (values | {"kept_packed_seq_params": set(), "current_max_attn_logits": None}).items():
        setattr(layer, name, value)
    return layer


def attend(layer: Any, query: Tensor) -> Tensor:
    """A forward pass with `FusedAttention` in the place of the kernels of a GPU."""
    from megatron.core.transformer.enums import AttnMaskType

    parent = type(layer).__mro__[1]
    with mock.patch.object(parent, "forward", lambda self, query, *_, **__: FusedAttention.apply(query)):
        output: Tensor = layer(query, query, query, None, AttnMaskType.causal)
    return output


def kept_after_training() -> int:
    """How many forward passes still keep what their autograd node had, after their backward."""
    layer = attention()
    FusedAttention.kept.clear()
    for step in range(STEPS):
        query = torch.randn(TOKENS, BATCH, HEADS, HEAD, generator=torch.Generator().manual_seed(step))
        attend(layer, query.requires_grad_()).sum().backward()
    gc.collect()
    return sum(kept() is not None for kept in FusedAttention.kept)


@proof("{:.0f} of 4 microbatches kept alive", right="no microbatch kept alive", defect="memory", te=True)
def what_attention_kept_is_freed_by_backward(here: Here) -> int:
    """With log_max_attention_logit the graphs of all microbatches stay alive, and memory grows with each.

    To reproduce: train a model with Transformer Engine's attention and `log_max_attention_logit=True`, and look at
    `core_attention.current_max_attn_logits.grad_fn` behind a step: a chain of MaximumBackward nodes that ends at the
    attention of the first microbatch. Here an autograd function in torch stands for Transformer Engine's fused
    attention, whose kernels need a GPU. It counts what its nodes keep.

    TEDotProductAttention.forward takes torch.max of the value before and of the new one, with their graphs, and nobody
    calls backward on it. Right is to detach: the value is only logged. From 0.16 to 0.18; 0.19 detaches, by pull
    request 5067.
    """
    kept: int = here.run(kept_after_training)[0]
    return kept


def logged(values: list[float]) -> list[float]:
    """What clip_qk logs in steps whose largest logits are `values`."""
    from megatron.core.optimizer.qk_clip import clip_qk

    layer = attention()
    layers = [SimpleNamespace(self_attention=SimpleNamespace(clip_qk=None, core_attention=layer))]
    chunk = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(decoder=SimpleNamespace(layers=layers))))
    found = []
    for value in values:
        attend(layer, torch.full((TOKENS, BATCH, HEADS, HEAD), value, requires_grad=True)).sum().backward()
        with torch.no_grad():
            largest = layer.current_max_attn_logits
            layer.current_max_attn_logits = largest.detach()  # else the all-reduce in place is refused
        found.append(clip_qk([chunk], log_max_only=True))
    return found


def wrong_logs() -> int:
    """Steps whose logged maximum is not their own."""
    values = [3.0, 1.0, 2.0]
    return sum(found != value for found, value in zip(logged(values), values, strict=True))


@proof("{:.0f} of 3 steps logged wrongly", right="each step logs its own maximum", te=True, variants=("v0_17",))
def a_step_logs_its_own_largest_logit(here: Here) -> int:
    """With log_max_attention_logit and without qk_clip, the logged number is the largest of the whole run.

    To reproduce: call `clip_qk(model, log_max_only=True)` behind each step, as the training loop does.

    Only a clip begins the maximum anew, so a step with smaller logits logs the number of an earlier step. Right is the
    step's own. In 0.17 and 0.18; 0.19 begins anew, by pull request 5067. 0.16 has the same, and is left.
    """
    wrong: int = here.run(wrong_logs)[0]
    return wrong
