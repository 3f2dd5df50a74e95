"""Proofs of router-padding-mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_features import need_padding_mask
from shim.testing import Layout
from shim.testing.proof import Here, LacksFeatureError, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "share_embeddings_and_output_weights": False,
}
TOKENS, PADDING = 10, 6


def gradients(model: Any, padding: int, part: str = "mtp") -> list[Tensor]:
    """Of the routers of a part, after a step on a row that ends in padding of this id."""
    places = torch.arange(TOKENS + PADDING)[None]
    row, mask = places.clone(), places >= TOKENS
    row[mask] = padding
    trained = places < TOKENS - 1  # the last token would predict padding
    with eager():
        losses = model(row, places, None, labels=row.roll(-1), loss_mask=trained.float(), padding_mask=mask)
        losses[trained].mean().backward()
    return [weight.grad for name, weight in model.named_parameters() if f"{part}." in name and "router.weight" in name]


def moved(build: Callable[[], Any], part: str = "mtp") -> float:
    """By how much, in parts of it, the gradient of routers changes with the ids of padding."""
    need_padding_mask()
    one, other = gradients(build(), 11, part), gradients(build(), 50, part)
    assert one
    return max(float((a - b).norm() / a.norm()) for a, b in zip(one, other, strict=True))


def of_a_gpt_model(**options: Any) -> float:
    return moved(lambda: testing.build_gpt(**{**MODEL, "mtp_num_layers": 2, **options}))


@proof("gradient moves by {:.1e} of it with the ids of padding", bound=1e-6)
def a_router_of_mtp_leaves_padding_out(here: Here) -> float:
    """Routers in layers of multi-token prediction count and balance padding.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_topk=2`, `moe_aux_loss_coeff=0.1` and
    `mtp_num_layers=2`, and run forward and backward with labels, loss mask and `padding_mask` on a row that ends in
    padding. Replace the ids of padding by others, and compare the gradients of `mtp.layers.*` routers.

    Attention is causal and padding is in no loss, so that its ids can matter to no weight. In 0.16 and 0.17
    `GPTModel._postprocess` gives MTP no padding_mask. From 0.18 on each layer rolls the mask, and the zero with which a
    roll ends says that the last token of the row is no padding.
    """
    return float(here.run(of_a_gpt_model)[0])


def of_a_hybrid_model(**options: Any) -> float:
    if not hasattr(_hybrid_model(), "mtp_process") and "mtp" not in inspect.getsource(_hybrid_model().forward):
        raise LacksFeatureError("hybrid models of this release have no multi-token prediction")
    return moved(lambda: testing.build_hybrid("*E/*E", **{**MODEL, **options}))


def _hybrid_model() -> Any:
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel as found
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel as found
    return found


@proof("gradient moves by {:.1e} of it with the ids of padding", bound=1e-6)
def a_router_of_a_hybrid_models_mtp_leaves_padding_out(here: Here) -> float:
    """Routers in the MTP of a hybrid model count and balance padding.

    To reproduce: as above, with a HybridModel (MambaModel in 0.17) of the pattern `*E/*E`. Its forward calls `self.mtp`
    without padding_mask in every release. From 0.17 on.
    """
    return float(here.run(of_a_hybrid_model)[0])


def of_a_schedule() -> float:
    """How far the gradient of a router in the overlapped schedule is from that in the layer's forward, in parts."""
    need_padding_mask()
    from megatron.core.models.gpt.fine_grained_callables import build_transformer_layer_callables

    mask = torch.arange(TOKENS + PADDING)[None] >= TOKENS
    states = torch.randn(TOKENS + PADDING, 1, 32, generator=torch.Generator().manual_seed(0))

    def gradient(overlapped: bool) -> Tensor:
        model: Any = testing.build_gpt(**MODEL, mtp_num_layers=None)
        layer = model.decoder.layers[0]
        with eager():
            if overlapped:
                (attention, *_), _ = build_transformer_layer_callables(layer)
                names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
                chunk = SimpleNamespace(**dict.fromkeys((*names, "sequence_len_offset")), padding_mask=mask)
                node = SimpleNamespace(
                    chunk_state=chunk, layer_state=SimpleNamespace(), detach=lambda tensor: tensor, is_mtp=False
                )
                tokens, probs = attention(node, states)
            else:
                attended, _ = layer._forward_attention(states, None)
                tokens = layer.pre_mlp_layernorm(attended)
                probs, _ = layer.mlp.route(tokens, mask.transpose(0, 1))
            # Of the auxiliary loss alone, which hangs on the probabilities.
            (probs.sum() * 0.0).backward()
        found: Tensor = layer.mlp.router.weight.grad
        return found

    truth = gradient(False)
    return float((gradient(True) - truth).norm() / truth.norm())


@proof("gradient off by {:.1e}", bound=1e-6)
def a_router_of_an_overlapped_schedule_leaves_padding_out(here: Here) -> float:
    """With overlap_moe_expert_parallel_comm routers count and balance padding.

    To reproduce: build a layer with `num_moe_experts=4` and `moe_aux_loss_coeff=0.1`, call the first function of
    `build_transformer_layer_callables(layer)` with a node whose `chunk_state.padding_mask` marks the end of the row,
    and run backward. Compare the gradient of the router with the one after `mlp.route(hidden_states, padding_mask)`.

    The function calls `layer.mlp.route(pre_mlp_layernorm_output)`. From 0.16 to 0.19; the dev branch passes the mask.
    """
    return float(here.run(of_a_schedule)[0])


def on_a_later_stage() -> Tensor:
    """The gradient of the router of a stage, summed over ranks, by its auxiliary loss alone."""
    need_padding_mask()
    from megatron.core import parallel_state

    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    states = torch.randn(TOKENS + PADDING, 1, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(TOKENS + PADDING)[None] >= TOKENS
    model: Any = testing.build_gpt(
        **MODEL, mtp_num_layers=None, pre_process=False, post_process=False, sequence_parallel=size > 1
    )
    model.set_input_tensor(states.chunk(size)[rank])
    with eager():
        (model(None, None, None, padding_mask=mask) * 0.0).sum().backward()
    gradient = model.decoder.layers[0].mlp.router.weight.grad
    if size > 1:
        torch.distributed.all_reduce(gradient)
    return gradient


@proof(
    "gradient off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: The size of tensor a .* must match the size of tensor b",
)
def a_later_stage_takes_a_padding_mask(here: Here) -> float:
    """Under sequence parallelism each pipeline stage but the first crashes with a padding mask.

    To reproduce: on two tensor-parallel ranks with `sequence_parallel=True`, build a GPTModel with
    `num_moe_experts=4`, `pre_process=False` and `post_process=False`, give it an input of half the tokens by
    `set_input_tensor`, and call it with the `padding_mask` of all tokens.

    `GPTModel._preprocess` scatters the mask on the first stage only, so the router of a later one has the mask of all
    tokens for its half of them. Right is the gradient of one rank. From 0.16 to 0.19.
    """
    truth = here.run(on_a_later_stage, layout=Layout())[0]
    found = here.run(on_a_later_stage, layout=Layout(tp=2, sequence_parallel=True))[0]
    return float((found - truth).norm() / truth.norm())
