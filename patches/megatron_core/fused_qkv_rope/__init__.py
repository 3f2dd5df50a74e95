"""The fused rotation of queries, keys and values in one kernel, which ignores how they are rotated.

What is wrong (0.15 to 0.20), silent: with `fused_single_qkv_rope` a layer rotates queries and keys in one kernel of
Transformer Engine, which is told the tables alone. It is not told
1. `rotary_interleaved`: it turns halves where the model has pairs.
2. the factor of YaRN (`yarn_rotary_scaling_factor` and its mscales, as gpt-oss has them): queries and keys are not
   scaled, 1.35 times for a scaling factor of 32.

The patch switches the option off in the config of a layer that is built, if the kernel would ignore one of the two, and
says so in a warning. The layer then rotates queries and keys by apply_rotary_pos_emb, fused if `apply_rope_fusion` is
on and can do it (rope-fusion). Other configs do not change.

Upstream: not reported.

Delete when: every supported release tells the kernel both, or refuses it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

ATTENTION = "megatron.core.transformer.attention"
INIT = ATTENTION + ":Attention.__init__"

_log = logging.getLogger("shim")


def _ignored(config: Any) -> str:
    """What is set in a config and would be ignored, in words; empty if nothing is."""
    if not config.fused_single_qkv_rope:
        return ""
    if config.rotary_interleaved:
        return "rotary_interleaved"
    factor = vars(sys.modules[ATTENTION])["_yarn_get_concentration_factor_from_config"](config)
    return f"the factor {factor:.4g} of YaRN" if factor != 1.0 else ""


def _init(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        config = config_of(args, kwargs)
        if ignored := _ignored(config):
            config.fused_single_qkv_rope = False
            _log.warning("fused-qkv-rope: fused_single_qkv_rope is off, because it ignores %s", ignored)
        original(*args, **kwargs)

    return __init__


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: an option that was switched on after the layer was built."""
    for model in models:
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        for config in configs.values():
            if hasattr(config, "fused_single_qkv_rope") and (ignored := _ignored(config)):
                yield (
                    f"fused_single_qkv_rope of a layer's config is on, and ignores {ignored}",
                    "call shim.apply() before the model is built, and leave the field off",
                )


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: _init}
