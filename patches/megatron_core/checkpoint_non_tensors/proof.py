"""Proofs of checkpoint-non-tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.testing.proof import Here, proof

UNIFORM: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RAISED = r"^TypeError: save_for_backward can only save variables, but argument \d+ is of type tuple"


class TwoTables(nn.Module):
    """In the place of rotary embeddings: a table for layers with local attention, and one for the others."""

    def __init__(self, usual: Any, local: Any) -> None:
        super().__init__()
        self.usual, self.local = usual, local

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        return self.usual.get_rotary_seq_len(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.local(*args, **kwargs), self.usual(*args, **kwargs)


def choose(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention of layers with an odd number takes the first table, and of the others the second."""
    tables = kwargs["rotary_pos_emb"]
    assert type(tables) is tuple, type(tables)
    return args, {**kwargs, "rotary_pos_emb": tables[(attention.layer_number - 1) % 2]}


def with_two_tables(build: Any = testing.build_gpt, **options: Any) -> Any:
    """A model as Gemma 3 and 4: its rotary embeddings are a tuple, of which each attention takes one."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.attention import SelfAttention

    model: Any = build(**options)
    width = model.config.kv_channels
    local = RotaryEmbedding(width, rotary_percent=1.0, rotary_base=10, use_cpu_initialization=True)
    model.rotary_pos_emb = TwoTables(model.rotary_pos_emb, local)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.register_forward_pre_hook(choose, with_kwargs=True)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    """Those of a step, and its losses."""
    row = torch.arange(12)[None]
    losses = model(row, row, None, labels=row.roll(-1))
    losses.mean().backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"losses": losses.detach(), **grads}


def unequal(found: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    """How many differ in any bit, or are missing."""
    return sum(name not in found or not torch.equal(found[name], right[name]) for name in right)


def with_recompute(**options: Any) -> int:
    right = gradients(with_two_tables(**options))
    return unequal(gradients(with_two_tables(**options, **UNIFORM)), right)


def of_decoder() -> int:
    return with_recompute(mtp_num_layers=None)


def of_prediction() -> int:
    return with_recompute(mtp_num_layers=1)


@proof(
    "{:.0f} losses and gradients differ",
    right="bit-equal",
    defect="crash",
    crashes=RAISED,
    variants=("v0_12",),
)
def layers_with_two_rotary_tables_are_recomputed(here: Here) -> int:
    """A model with two rotary tables cannot be trained with full activation recompute.

    To reproduce: build a GPTModel with two layers and `recompute_granularity="full"`, `recompute_method="uniform"`,
    `recompute_num_layers=1`. Let its `rotary_pos_emb` return a tuple of two tables, and each layer's attention take one
    of them, as the models of Gemma 3 and 4 do. Run a step: "TypeError: save_for_backward can only save variables, but
    argument 4 is of type tuple".

    `TransformerBlock._checkpointed_forward` (in 0.18 `checkpointed_forward` of `megatron.core.recompute`) hands the
    tuple to `tensor_parallel.checkpoint`, which saves each argument for backward as it is. Right are the gradients
    without recompute, to the bit. Fixed in 0.19 (Megatron-LM pull request 5324).
    """
    wrong: int = here.run(of_decoder)[0]
    return wrong


@proof(
    "{:.0f} losses and gradients differ",
    right="bit-equal",
    defect="crash",
    crashes=RAISED,
    variants=("v0_19",),
)
def prediction_layers_with_two_rotary_tables_are_recomputed(here: Here) -> int:
    """Multi-token prediction of a model with two rotary tables cannot be trained with full activation recompute.

    To reproduce: build a GPTModel with two layers, `mtp_num_layers=1` and `recompute_granularity="full"`,
    `recompute_method="uniform"`, `recompute_num_layers=1`. Let its `rotary_pos_emb` return a tuple of two tables, and
    each layer's attention take one of them. Run a step: "TypeError: save_for_backward can only save variables, but
    argument 6 is of type tuple".

    `MultiTokenPredictionLayer._checkpointed_forward` hands the tuple to `tensor_parallel.checkpoint`, which saves each
    argument for backward as it is. Right are the gradients without recompute, to the bit. The decoder is right from
    0.19 on. Open for multi-token prediction.
    """
    wrong: int = here.run(of_prediction)[0]
    return wrong
