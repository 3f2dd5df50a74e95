"""Proof of mtp-without-te."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

INFERENCE = "megatron.core.tensor_parallel.inference_layers"
CONFIG: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "mtp_num_layers": 1,
    "add_bias_linear": False,
    **ON_CPU,
}


def missing_layers() -> int:
    """MTP layers that were asked for and not built."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    if find_spec(INFERENCE) is not None and inspect.isclass(
        getattr(import_module(INFERENCE), "InferenceLayerNormColumnParallelLinear", None)
    ):
        raise CannotRunError("Transformer Engine is installed, and the layers for inference are classes")
    config = TransformerConfig(**CONFIG)
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    spec = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    block: Any = MultiTokenPredictionBlock(config=config, spec=spec)
    return CONFIG["mtp_num_layers"] - len(block.layers)


@proof("{:.0f} layers missing", right="the layer is built", defect="crash", crashes=r"^TypeError: isinstance\(\) arg 2")
def a_layer_of_local_modules_is_built(here: Here) -> int:
    """No model with multi-token prediction can be built without Transformer Engine.

    To reproduce: without Transformer Engine, build a MultiTokenPredictionBlock of
    `get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), use_transformer_engine=False)` with `mtp_num_layers=1`,
    or a GPTModel with it. MultiTokenPredictionLayer asks is_inference_column_parallel_linear(self.eh_proj). That calls
    isinstance() with two layers for inference, which are mocks without Transformer Engine, and raises a TypeError.

    Right is a layer: what is no class has no instances, so the answer is no.

    In 0.20, since Megatron-LM pull request 5748. Up to 0.19 nothing asks.
    """
    missing: int = here.run(missing_layers)[0]
    return missing
