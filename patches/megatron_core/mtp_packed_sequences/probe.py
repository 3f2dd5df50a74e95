"""Tries an override on a packed row with padding: does each token predict the next one of its own sequence?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shim.patches._stubs import WIDTH, Embedding, PaddedRow, config_of, device_of, names_of, taken_by, view_of
from shim.patches.megatron_core._mtp_checkpoint import quantized
from shim.patches.megatron_core._mtp_tries import runs_full_recompute, tried
from shim.patches.megatron_core.mtp_packed_sequences.step import in_step

LAYER = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer."
POSTPROCESS = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"


def probe(module: Any, method: str, models: list[Any]) -> bool | str | None:
    """See docs/patch-modules.md."""
    if not getattr(module.config, "mtp_num_layers", None):
        return True  # a model without multi-token prediction
    found = PROBES.get(method)
    return "shim has no way to try this method" if found is None else found(module)


def _get_embeddings(layer: Any) -> bool | str:
    row, embedding = PaddedRow(device_of(layer)), Embedding()
    view = view_of(layer, config_of(layer), cp_group=None)
    masked = "padding_mask" in taken_by(view._get_embeddings, (), padding_mask=None)
    result = _embedded(view, row, embedding)
    if not isinstance(result, tuple) or not embedding.seen:
        return "it returns something else than upstream's method"
    if not row.moved(result[0], row.ids) or not row.moved(embedding.seen[-1], row.ids):
        return False
    if not masked or not _routers_count_tokens(layer.config):
        return True
    padding = torch.zeros_like(row.ids, dtype=torch.bool)
    padding[0, list(row.padding)] = True
    told = _embedded(view, row, embedding, padding_mask=padding)[2]
    if isinstance(told, Tensor) and told.shape == padding.shape:
        # The last token of a sequence predicts nothing, so it counts neither as padding nor as a token.
        token = all(not told[0, at] for at in row.followed)
        if token and all(told[0, at] for at in row.padding):
            return True
    return "padding counts as tokens for the router of experts, if the batch has a padding mask"


def _routers_count_tokens(config: Any) -> bool:
    """Whether it matters to the routers of experts which tokens are padding: for their losses, and for their bias."""
    if not getattr(config, "num_moe_experts", None):
        return False
    balances = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff
    return bool(balances or config.moe_z_loss_coeff or config.moe_router_enable_expert_bias)


def _embedded(view: Any, row: PaddedRow, embedding: Embedding, padding_mask: Any = None) -> Any:
    arguments = taken_by(
        view._get_embeddings,
        names_of(LAYER + "_get_embeddings"),
        input_ids=row.ids,
        position_ids=row.position_ids,
        embedding=embedding,
        hidden_states=torch.zeros(row.length, 1, WIDTH, device=row.ids.device),
        packed_seq_params=row.params,
        padding_mask=padding_mask,
    )
    with in_step(row.params):  # up to 0.15 the row reaches the rolls by the step of the model
        return view._get_embeddings(**arguments)


def _layer_forward(layer: Any) -> bool | str:
    """0.14, 0.15: does the row reach what runs inside, and do the inputs fit?"""
    row, seen = PaddedRow(device_of(layer)), []

    def inside(*args: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return hidden_states

    view = view_of(
        layer,
        config_of(layer, recompute_granularity=None),
        _proj_and_transformer_layer=inside,
        cp_group=None,
        training=False,
    )
    with torch.no_grad(), in_step(row.params):
        view.forward(
            **taken_by(
                view.forward,
                names_of(LAYER + "forward"),
                input_ids=row.ids,
                position_ids=row.position_ids,
                hidden_states=torch.zeros(row.length, 1, WIDTH, device=row.ids.device),
                attention_mask=None,
                rotary_pos_emb=torch.zeros(row.length, 1, 1, 2, device=row.ids.device),
                packed_seq_params=row.params,
                embedding=Embedding(),
            )
        )
    if len(seen) != 1 or "decoder_input" not in seen[0]:
        return "it does not run the layer as upstream does"
    inputs = seen[0]["decoder_input"][..., 0].t()
    return seen[0].get("packed_seq_params") is row.params and row.moved(inputs, row.ids.float())


def _checkpointed_forward(layer: Any) -> bool | str:
    """Does the recompute of a packed row run, and have the row again?"""
    if not runs_full_recompute(layer):
        return True
    if quantized(layer.config):
        return "shim cannot run FP8 or FP4 on a tiny input"
    row = PaddedRow(device_of(layer))
    step, right = tried(layer, row)
    return right and all(given is row.params for given in step.rows)


class _Head(torch.nn.Module):
    """In the place of the output layer: logits are the states."""

    sequence_parallel = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(WIDTH, WIDTH, device=device), persistent=False)

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return states, None


class _Block:
    """In the place of the MTP block: puts the states of one depth behind those of the main model."""

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return torch.cat((hidden_states, self.states))

    __call__ = forward


def _postprocess(model: Any) -> bool | str:
    """Which targets have the tokens in the loss of the first depth, and which tokens count?"""
    row = PaddedRow(device_of(model))
    ones = torch.ones_like(row.labels)
    given: list[Callable[[], Any]] = [lambda: None, lambda: ones.float(), lambda: ones.bool()]
    for loss_mask in given:  # of several kinds, because trainers differ in what they take
        try:
            return _loss_of(model, row, loss_mask())
        except (TypeError, RuntimeError) as error:
            last = error
    raise last


def _loss_of(model: Any, row: PaddedRow, loss_mask: Any) -> bool | str:
    shape = (row.length, 1, WIDTH)
    main, deeper = (torch.full(shape, depth, device=row.ids.device, requires_grad=True) for depth in (1.0, 2.0))
    labels: list[Tensor] = []

    def loss(given: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (logits == 2.0).all():  # else it is the main loss
            labels.append(given.clone())
        return logits.sum(-1).t()

    one = {"mtp_num_layers": 1, "mtp_unroll_steps": 1, "mtp_loss_scaling_factor": 1.0}
    view = view_of(
        model,
        config_of(model, calculate_per_token_loss=False, **one),
        mtp=_Block(deeper),
        embedding=Embedding(),
        output_layer=_Head(row.ids.device),
        compute_language_model_loss=loss,
        shared_embedding_or_output_weight=lambda: None,
        cp_group=None,
        pg_collection=None,
        post_process=True,
        mtp_process=True,
        training=False,  # in training, losses would be logged
    )
    names = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "decoder_input", "attention_mask", "padding_mask")
    arguments = taken_by(
        view._postprocess,
        names_of(POSTPROCESS),
        hidden_states=main * 1,
        input_ids=row.ids,
        position_ids=row.position_ids,
        labels=row.labels,
        loss_mask=loss_mask,
        mtp_in_postprocess=True,
        packed_seq_params=row.params,
        **dict.fromkeys(names),
    )
    output = view._postprocess(**arguments)
    output.sum().backward()
    if deeper.grad is None or not deeper.grad.any():
        return "it gives the states of multi-token prediction no gradient"
    counted = [at for at in range(row.length) if deeper.grad[at].any()]
    if counted != list(row.followed):
        return False
    if not labels:
        return "it computes the loss of multi-token prediction in its own way"
    weights = deeper.grad[counted]
    return row.moved(labels[0], row.labels) and bool((weights == weights[0]).all())


PROBES: dict[str, Callable[[Any], bool | str]] = {
    LAYER + "_get_embeddings": _get_embeddings,
    LAYER + "forward": _layer_forward,
    LAYER + "_checkpointed_forward": _checkpointed_forward,
    POSTPROCESS: _postprocess,
}
