"""Clamps and offsets of gated activations (activation_func_clamp_value, glu_linear_offset) that fast paths ignore.

What is wrong (0.15 to 0.19): the plain path of a gated MLP clamps both halves to `activation_func_clamp_value` and adds
`glu_linear_offset`, as a model may have been pretrained (SwiGLU with a limit, say). Three other paths ignore what is
set, without a word, so that forward and backward are those of another model:
1. `bias_activation_fusion` with SiLU or GELU, in dense layers, experts and shared experts. With quick GELU, as gpt-oss
   has it, experts do clamp.
2. `use_te_activation_func`, for the clamp and the offset.
3. `moe_shared_expert_overlap`: overlapped shared experts do neither, on any path.

The patch switches the fast paths off in the config of a layer that is built, each of them only if it would ignore what
is set, and says so in a warning. The layer then takes the plain path. Other configs do not change. Layers of
`use_transformer_engine_op_fuser` do not read these fields, and are not covered.

Upstream: Megatron-LM pull request 5940, on the main branch since 2026-08-13, for 0.20. There fused SwiGLU clamps, and
the fast paths that do not are refused.

Delete when: the releases before the one that brings pull request 5940 are not supported.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.nn.functional as F

from shim.patches._arguments import Function, argument

MLP = "megatron.core.transformer.mlp:MLP.__init__"
MOE = "megatron.core.transformer.moe.moe_layer:MoELayer.__init__"

_log = logging.getLogger("shim")


def _ignoring(config: Any) -> list[str]:
    """The fields of a config that are on and choose a path which ignores its clamp or its offset."""
    clamps = config.activation_func_clamp_value is not None
    if not config.gated_linear_unit or not (clamps or config.glu_linear_offset):
        return []
    # With an offset upstream itself refuses fused SiLU and GELU.
    fused = config.bias_activation_fusion and clamps and config.activation_func in (F.silu, F.gelu)
    found = ["bias_activation_fusion"] if fused else []
    return found + [name for name in ("use_te_activation_func", "moe_shared_expert_overlap") if getattr(config, name)]


def _with_plain_path(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        config = config_of(args, kwargs)
        for field in _ignoring(config):
            setattr(config, field, False)
            _log.warning(
                "clamped-activations: %s is off, because it ignores activation_func_clamp_value=%s or "
                "glu_linear_offset=%s",
                field,
                config.activation_func_clamp_value,
                config.glu_linear_offset,
            )
        original(*args, **kwargs)

    return __init__


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: a path that was switched on after the layer was built."""
    for model in models:
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        for config in configs.values():
            if hasattr(config, "gated_linear_unit") and (fields := _ignoring(config)):
                yield (
                    f"{' and '.join(fields)} of a layer's config is on, and ignores its clamp or offset",
                    "call shim.apply() before the model is built, and leave the field off",
                )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {MLP: _with_plain_path, MOE: _with_plain_path}
