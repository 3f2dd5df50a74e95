"""Config classes whose fields for YaRN are None.

What is wrong (0.15 to 0.20): attention asks by hasattr whether a config has the fields of YaRN, and takes the factor
of YaRN from them. TransformerConfig has no such fields. The config classes of trainers have them for all models, as
the model providers of Megatron-Bridge do, and leave them None for models without YaRN. Then None is compared with a
number, which raises a TypeError: up to 0.18 in every forward pass, and from 0.19 when the model is built.

The patch makes the factor 1.0 if `yarn_rotary_scaling_factor` is None, as without such a field. Any other
config goes to upstream's function as it is.

Upstream: open. Megatron-Bridge deletes its fields that are None before it builds a model.

Delete when: every supported release asks for the value of the field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

TARGET = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:_yarn_get_concentration_factor_from_config"


def _factor(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def _yarn_get_concentration_factor_from_config(*args: Any, **kwargs: Any) -> Any:
        if getattr(config_of(args, kwargs), "yarn_rotary_scaling_factor", None) is None:
            return 1.0
        return original(*args, **kwargs)

    return _yarn_get_concentration_factor_from_config


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _factor}
