"""The scale of multi-latent attention with plain rotary embeddings.

What is wrong (0.12 and 0.13): MultiLatentAttention multiplies the scale of its softmax by the square of YaRN's factor,
also with `rope_type="rope"`, which has no YaRN. The factor comes from `rotary_scaling_factor` and `mscale`, whose
defaults are 40 and 0.707: scores are 1.59 times too large. A model without YaRN that is trained elsewhere, such as
Moonlight, computes something else.

The patch lets the config say a scaling factor of 1 while such a layer is built. With `rope_type="yarn"`, and with a
factor of 1 in the config, nothing changes.

Upstream: 0.14 reads `mscale_all_dim` in the place of `mscale`, which is 0 by default, so that the factor is 1 unless a
config asks for it.

Delete when: megatron-core 0.13 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

INIT = "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__"


def _init(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        config = config_of(args, kwargs)
        factor = config.rotary_scaling_factor
        if config.rope_type != "rope" or factor <= 1:
            return original(*args, **kwargs)
        config.rotary_scaling_factor = 1.0
        try:
            return original(*args, **kwargs)
        finally:
            config.rotary_scaling_factor = factor

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: _init}
