"""Proofs of overlap-norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_features import need_option
from shim.testing.proof import Here, LacksFeatureError, proof

TOKENS = 8
PLANS = "megatron.core.models.common.model_chunk_schedule_plan"
OF_THE_CHUNK = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")


def node_of(model: Any, is_last: bool = True) -> SimpleNamespace:
    """What the schedule gives the pieces of a layer of this model."""
    state = SimpleNamespace(model=model, **dict.fromkeys((*OF_THE_CHUNK, "sequence_len_offset", "padding_mask")))
    return SimpleNamespace(
        chunk_state=state,
        layer_state=SimpleNamespace(),
        is_mtp=False,
        is_last_layer=is_last,
        detach=lambda given: given,
    )


def pieces_of(layer: Any) -> Any:
    """The functions that run it, in their order."""
    try:
        from megatron.core.models.gpt.fine_grained_callables import build_transformer_layer_callables
    except ImportError:
        raise LacksFeatureError("this release does not overlap the messages of experts") from None
    return build_transformer_layer_callables(layer)[0]


def random_states() -> Tensor:
    return torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def schedules_on_cpu() -> Iterator[None]:
    """What a schedule in pieces asks a GPU for. No piece frees its input, which on one rank is an output as well."""
    names = ("megatron.core.models.common.utils", "megatron.core.models.gpt.fine_grained_callables")
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager())
        for module in (import_module(name) for name in names if find_spec(name)):
            if hasattr(module, "should_free_input"):
                stack.enter_context(mock.patch.object(module, "should_free_input", lambda *_: False))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *_: None))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None))
        import_module("megatron.core.pipeline_parallel.utils").set_streams()
        yield


def losses(model: Any, overlapped: bool) -> Tensor:
    """Of the tokens of a row."""
    row = torch.arange(TOKENS)[None]
    given = {"labels": row.roll(-1, 1), "loss_mask": torch.ones(1, TOKENS)}
    found: Tensor
    if not overlapped:
        found = model(row, row, None, **given)
        return found
    if not find_spec(PLANS):
        raise LacksFeatureError("this release does not overlap the messages of experts")
    with schedules_on_cpu():
        plan = model.build_schedule_plan(row, row, None, **given)
        found = plan.run(plan, None)
        return found.detach()


def off_by() -> float:
    """How far losses of a dense model in the schedule are from those of its forward, in parts of them."""
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    found, right = losses(model, overlapped=True), losses(model, overlapped=False)
    return float((found - right).norm() / right.norm())


@proof("losses off by {:.1e}", bound=1e-6)
def a_dense_last_layer_is_followed_by_the_final_norm(here: Here) -> float:
    """With overlap_moe_expert_parallel_comm a model whose last layer is dense has no final norm.

    To reproduce: build a GPTModel with one dense layer, run `plan = model.build_schedule_plan(...)` and
    `plan.run(plan, None)` with labels, and compare with the model's forward. A training meets it with
    `moe_layer_freq=2`.

    The piece of a layer that combines the tokens of experts ends with `decoder.final_layernorm`. A dense layer has no
    such piece, and nothing behind the layers norms. Right are the losses of the forward. From 0.16 to 0.20.
    """
    return float(here.run(off_by)[0])


class NormAndResidual(torch.nn.LayerNorm):
    """As TEFusedResidualRMSNorm: it returns its input, too."""

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[s, b, h] -> twice [s, b, h]."""
        return super().forward(states), states


def routed(returns_residual: bool) -> Any:
    """The first piece of a layer of experts: the tokens that it gives to experts, their probabilities, the residual."""
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, num_moe_experts=4, moe_router_topk=2)
    layer, node = model.decoder.layers[0], node_of(model)
    if returns_residual:
        layer.config.fused_residual_rmsnorm = True
        layer.pre_mlp_layernorm.__class__ = NormAndResidual
    with eager():
        tokens, probs = pieces_of(layer)[0](node, random_states())
    return tokens, probs, node.layer_state.residual


def off_beside_a_residual() -> float:
    """How far they are with a norm that returns the residual from those with one that does not."""
    need_option("fused_residual_rmsnorm", "norm that returns the residual")
    found, right = routed(returns_residual=True), routed(returns_residual=False)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


@proof(
    "tokens off by {:.1e}",
    bound=0,
    defect="crash",
    crashes=r"^AttributeError: 'tuple' object has no attribute",
    variants=("v0_17",),
)
def experts_get_the_output_of_their_norm(here: Here) -> float:
    """With overlap_moe_expert_parallel_comm and fused_residual_rmsnorm a layer of experts raises.

    To reproduce: build a GPTModel with experts whose `pre_mlp_layernorm` returns its output and its input, as
    TEFusedResidualRMSNorm does, and call the first piece of `build_transformer_layer_callables(layer)`.

    It gives what the norm returns to the router. Right are the tokens of a norm that returns the output alone. In 0.17;
    pull request 4026 fixes it in 0.18.
    """
    return float(here.run(off_beside_a_residual)[0])
