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

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches.megatron_core._ignored_settings import problems_of, put_off

ID = "fused-qkv-rope"
ATTENTION = "megatron.core.transformer.attention"
INIT = ATTENTION + ":Attention.__init__"


def _ignored(config: Any) -> Mapping[str, str]:
    if not getattr(config, "fused_single_qkv_rope", False):
        return {}
    if config.rotary_interleaved:
        return {"fused_single_qkv_rope": "rotary_interleaved"}
    factor = vars(sys.modules[ATTENTION])["_yarn_get_concentration_factor_from_config"](config)
    return {"fused_single_qkv_rope": f"the factor {factor:.4g} of YaRN"} if factor != 1.0 else {}


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: an option that was switched on after the layer was built."""
    return problems_of(models, _ignored)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: put_off(ID, _ignored)}
