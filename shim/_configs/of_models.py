"""What models show of a run: their configs, their modules, and megatron's parallel state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shim._configs.settings import facts_from
from shim._matrix.concerns import Run, given_facts

__all__ = ["parameters_of", "run_of_models"]


# What megatron-core's config decides. A config without the setting belongs to a release without the feature.
_OF_CONFIG = (
    *("mtp", "moe", "router-replay", "mla", "gated-attention", "mamba", "gdn", "dsa", "mrope", "fused-rope"),
    *("expert-bias", "per-token-loss"),
    *("fp32-residual", "max-logit", "recompute", "fused-loss", "sp", "layout", "fp8", "cuda-graph"),
    *("tp", "cp", "pp", "ep"),
)
_CLASSES = {
    "MultiTokenPredictionLayer": "mtp",
    "MoELayer": "moe",
    "MultiLatentAttention": "mla",
    "MambaMixer": "mamba",
    "GatedDeltaNet": "gdn",
    "DSAttention": "dsa",
    "MultimodalRotaryEmbedding": "mrope",
}
_PARALLEL_STATE = "megatron.core.parallel_state"
_SIZE_FUNCTIONS = {
    "tp": "get_tensor_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "pp": "get_pipeline_model_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
}


def run_of_models(models: Sequence[Any], has_te: bool) -> Run:
    """What the models show. Words that no config, module or group decides, such as packed rows, are not known."""
    modules = [module for model in models for module in model.modules()]
    # vars(), because an attribute of a user's module may be a property that does something.
    configs = {id(config): config for config in _values(modules, "config") if hasattr(config, "num_attention_heads")}
    facts = given_facts(has_te)
    facts["lora"] = any(not p.requires_grad for model in models for p in parameters_of(model))
    if configs:

        def read(name: str) -> list[Any]:
            found = [getattr(config, name) for config in configs.values() if hasattr(config, name)]
            return [*found, *_values(modules, name)]

        facts.update(dict.fromkeys(_OF_CONFIG, False) | facts_from(read, _OF_CONFIG))
    names = {base.__name__ for module in modules for base in type(module).__mro__}
    facts.update({word: True for name, word in _CLASSES.items() if name in names})
    state = sys.modules.get(_PARALLEL_STATE)
    if state is not None and state.model_parallel_is_initialized():  # megatron has made its groups
        facts.update({word: True for word, name in _SIZE_FUNCTIONS.items() if getattr(state, name)() > 1})
    sharded = [getattr(ddp, "use_distributed_optimizer", False) for ddp in _values(modules, "ddp_config")]
    if sharded:
        facts["distributed-optimizer"] = any(sharded)
    return Run(facts, "this model")


def _values(modules: Sequence[Any], name: str) -> Iterator[Any]:
    for module in modules:
        held = getattr(module, "__dict__", {})
        if name in held:
            yield held[name]


def parameters_of(model: Any) -> Iterator[Any]:
    """None of what check() also takes for a model: an object that only has modules()."""
    find = getattr(model, "parameters", None)
    yield from () if find is None else find()
