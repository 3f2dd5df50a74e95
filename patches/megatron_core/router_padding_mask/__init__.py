"""A router sees the padding of its own tokens, whoever calls it.

What is wrong (0.16 to 0.20): a model takes a padding mask [b, s], so that routers of experts leave padding out of
auxiliary losses, z-loss and counts. The layers of the decoder get it. These do not, or get another one's:
1. Layers of multi-token prediction (MTP): none in GPTModel before 0.18, and none in a hybrid model at all.
2. overlap_moe_expert_parallel_comm calls each router without it, and without it beside CUDA graphs of attention.
3. Under sequence parallelism a rank has a share of the tokens. The first stage of a GPTModel cuts the mask alike.
   Later stages, a hybrid model, and a model that is given decoder_input keep the whole one, and the step raises.
4. The mask of an MTP layer is rolled as its tokens are, and a roll ends with a zero, which says that the end of a row
   is no padding. Under sequence parallelism every rank's share ends so (0.18 to 0.20).

The patch hands on the mask of the call, and MoELayer.route takes the rank's share of a whole one:

    upstream's function                                   file: what the patch does there
    ----------------------------------------------------  -------------------------------------------------------------
    forward of GPTModel, MambaModel, HybridModel          prediction: keeps the mask for MTP (1)
      MultiTokenPredictionLayer.forward, up to 0.17       prediction: rolls it and gives it to the layer inside (1)
      MultiTokenPredictionBlock.forward, from 0.18        prediction: the whole mask of the call (1, 4)
        ..Layer._get_embeddings, from 0.18                prediction: the end of a row keeps what it was (4)
    build_transformer_layer_callables                     overlap: holds the mask of the chunk during a call (2)
        MoELayer.route                                    route: takes that mask, and the share of the rank (2, 3)

Nothing changes without a mask.

Not covered: a router inside of a captured CUDA graph (moe_router), which is captured without a mask; a model of a
trainer's own that makes the mask itself, as mcore-bridge's, and gives it to the decoder alone.

Upstream: 0.18 gives GPTModel's MTP its mask, and the dev branch the overlap (e348ed156e). The rest is open.

Delete when: megatron-core gives every router the mask of its tokens, and the releases before that are not supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches.megatron_core.router_padding_mask import overlap, prediction, route

MODELS = "megatron.core.models."
GPT = MODELS + "gpt.gpt_model:GPTModel.forward"
MAMBA = MODELS + "mamba.mamba_model:MambaModel.forward"
HYBRID = MODELS + "hybrid.hybrid_model:HybridModel.forward"
CALLABLES = MODELS + "gpt.fine_grained_callables:build_transformer_layer_callables"
MTP = "megatron.core.transformer.multi_token_prediction:MultiTokenPrediction"
ROUTE = "megatron.core.transformer.moe.moe_layer:MoELayer.route"

BOTH: dict[str, Callable[[Function], Function]] = {
    GPT: prediction.patch_model_forward,
    CALLABLES: overlap.patch_build_callables,
    ROUTE: route.patch_route,
}
BEFORE_0_18 = {**BOTH, MTP + "Layer.forward": prediction.patch_layer_forward}
BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_16": BEFORE_0_18,
    "v0_17": {**BEFORE_0_18, MAMBA: prediction.patch_model_forward},
    "v0_18": {
        **BOTH,
        HYBRID: prediction.patch_model_forward,
        MTP + "Block.forward": prediction.patch_block_forward,
        MTP + "Layer._get_embeddings": prediction.patch_get_embeddings,
    },
}


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. Nobody gives a mask to a forward pass that takes none."""
    config = module.config
    if not config.num_moe_experts or not getattr(config, "mtp_num_layers", None):
        return True
    if "padding_mask" not in inspect.signature(module.forward).parameters:
        return True
    return "shim cannot see whether multi-token prediction gets the padding mask of the call"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
