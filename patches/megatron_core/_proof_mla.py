"""Multi-latent attention alone, with the same weights for every tensor-parallel size, and how it trains.

Without Transformer Engine: a linear layer in torch stands for its TELinear.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_layers import train_layer
from shim.testing.attention import CPUCoreAttention
from shim.testing.layout import Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here

MLA = "megatron.core.transformer.multi_latent_attention"
TOKENS, BATCH, HIDDEN, HEADS = 8, 2, 16, 4
STEPS, LR = 3, 0.01


class Duplicated(torch.nn.Linear):
    """As TELinear with parallel_mode="duplicated": the whole weight on each rank, whose gradient SP sums."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, parallel_mode: str, **ignored: Any) -> None:
        assert parallel_mode == "duplicated"
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """[s, b, in] -> [s, b, out], and no bias."""
        return super().forward(hidden), None


@contextlib.contextmanager
def without_te() -> Iterator[Any]:
    """The module of multi-latent attention, with `Duplicated` in the place of Transformer Engine's TELinear."""
    module = import_module(MLA)
    with mock.patch.object(module, "TELinear", Duplicated, create=True):
        yield module


def build(module: Any, duplicated: bool = False, heads: int = HEADS, **overrides: Any) -> Any:
    """Multi-latent attention for this tensor-parallel size, with (its part of) the same weights for every size."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": heads,
        "multi_latent_attention": True,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 4,
        "rope_type": "rope",
        "add_bias_linear": False,
        **ON_CPU,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": size,
    }
    config = MLATransformerConfig(**{**settings, **overrides})
    layer_spec = gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=bool(overrides.get("qk_layernorm")), multi_latent_attention=True
    )
    spec = layer_spec.submodules.self_attention
    spec.submodules.core_attention = CPUCoreAttention
    if duplicated:
        if not hasattr(
            import_module("megatron.core.extensions.transformer_engine"), "TELinear"
        ) or "duplicated" not in (module.MLASelfAttention.__init__.__code__.co_consts):
            raise CannotRunError("no projection of this release is duplicated")
        spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = Duplicated
    layer = build_module(spec, config=config, layer_number=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(layer.named_parameters()):
            dim, shape = sharded_dim(weight), list(weight.shape)
            if dim is not None:
                shape[dim] *= size
            whole = torch.randn(shape, generator=generator) * 0.3
            weight.copy_(whole if dim is None else whole.chunk(size, dim)[rank])
    return layer


def sharded_dim(weight: Any) -> int | None:
    """Along which dimension ranks have parts of a weight; None where each has all of it."""
    return weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None


def trained(overrides: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor, int | None]]:
    """By name: a weight before and after some steps of SGD on this rank, and how it is sharded."""
    with without_te() as module:
        layer = build(module, **overrides)
        before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
        train_layer(layer, (TOKENS, BATCH, HIDDEN), steps=STEPS, rate=LR)
        return {
            name: (before[name], weight.detach().clone(), sharded_dim(weight))
            for name, weight in layer.named_parameters()
        }


def trained_with(cases: list[dict[str, Any]]) -> list[dict[str, tuple[Tensor, Tensor, int | None]]]:
    """What `trained` gives for each case."""
    return [trained(overrides) for overrides in cases]


def training_error(here: Here, *cases: dict[str, Any], **settings: Any) -> float:
    """How far a weight of any rank has moved elsewhere than on one rank, over how far it has moved there; the worst.

    settings: of one rank, and of all cases.
    """
    (truth,) = here.run(trained, settings)
    worst, trainings = 0.0, [{**settings, **case} for case in cases]
    for rank, results in enumerate(here.run(trained_with, trainings, layout=Layout(tp=here.world))):
        for name, (_, after, dim) in (item for found in results for item in found.items()):
            old, new = (whole if dim is None else whole.chunk(here.world, dim)[rank] for whole in truth[name][:2])
            worst = max(worst, float((after - new).norm() / (new - old).norm()))
    return worst
