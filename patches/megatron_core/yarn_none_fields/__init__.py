"""Config classes whose fields for YaRN are None.

What is wrong (0.15 to 0.20): attention asks by hasattr whether a config has the fields of YaRN, and takes the factor
of YaRN from them. TransformerConfig has no such fields. The config classes of trainers have them for all models, as
the model providers of Megatron-Bridge do, and leave them None for models without YaRN. Then None is compared with a
number, which raises a TypeError: up to 0.18 in every forward pass, and from 0.19 when the model is built.

0.15 also asks for the fields yarn_mscale and yarn_mscale_all_dim. Models with YaRN whose checkpoint has no value for
them, such as gpt-oss, have the factor 0.1 ln(yarn_rotary_scaling_factor) + 1. Without the fields 0.15 takes 1.0, in
silence, for the 1.3466 of gpt-oss. If they are None, attention and the table of YaRN raise a TypeError.

The patch makes the factor 1.0 if `yarn_rotary_scaling_factor` is None, as without such a field. In 0.15 it gives the
other two the values 1.0 and 0.0 if one of them is None or absent, which is the factor above. Anything else goes to
upstream's functions as it is.

Upstream: open for the scaling factor. Megatron-Bridge deletes its fields that are None before it builds a model. 0.16
takes the other two as the patch does (Megatron-LM pull request 2038).

Delete when: every supported release asks for the value of the field.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
FROM_CONFIG, FACTOR = YARN + "_yarn_get_concentration_factor_from_config", YARN + "_yarn_get_concentration_factor"
FIELDS = ("yarn_mscale", "yarn_mscale_all_dim")
NO_VALUES = (1.0, 0.0)  # of both fields, where one has none


def _from_config(original: Function, asks_for_all: bool) -> Function:
    """asks_for_all: upstream's function has no factor for a config without all fields."""
    config_of = argument(original, "config")

    @functools.wraps(original)
    def _yarn_get_concentration_factor_from_config(*args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        scaling = getattr(config, "yarn_rotary_scaling_factor", None)
        if scaling is None:
            return 1.0
        if asks_for_all and any(getattr(config, field, None) is None for field in FIELDS):
            return vars(sys.modules[original.__module__])["_yarn_get_concentration_factor"](scaling, *NO_VALUES)
        return original(*args, **kwargs)

    return _yarn_get_concentration_factor_from_config


def _factor(original: Function) -> Function:
    """Of 0.15. The table of YaRN gets the same fields, and asks here."""
    names = ("mscale", "mscale_all_dim")
    values_of, with_values = [argument(original, name) for name in names], [replacing(original, name) for name in names]

    @functools.wraps(original)
    def _yarn_get_concentration_factor(*args: Any, **kwargs: Any) -> Any:
        if any(value_of(args, kwargs) is None for value_of in values_of):
            for with_value, value in zip(with_values, NO_VALUES, strict=True):
                args, kwargs = with_value(args, kwargs, value)
        return original(*args, **kwargs)

    # Of upstream's cache.
    kept = ("cache_info", "cache_clear", "cache_parameters")
    vars(_yarn_get_concentration_factor).update(
        {name: getattr(original, name) for name in kept if hasattr(original, name)}
    )
    return _yarn_get_concentration_factor


def probe(function: Function, target: str, models: list[Any]) -> bool:
    """Asks for the factors of three configs. See docs/patch-modules.md."""

    def factor(*values: Any) -> float:
        return float(function(types.SimpleNamespace(**dict(zip(("yarn_rotary_scaling_factor", *FIELDS), values)))))

    try:
        without = factor(None, None, None), factor(32.0, None, None)
    except TypeError:  # None is compared with a number
        return False
    scaled = 0.1 * math.log(32.0) + 1
    found = *without, factor(32.0, 1.0, 0.0), factor(32.0, 1.0, 1.0), factor()
    return all(map(math.isclose, found, (1.0, scaled, scaled, 1.0, 1.0)))


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    if variant == "v0_15":
        return {FROM_CONFIG: functools.partial(_from_config, asks_for_all=True), FACTOR: _factor}
    return {FROM_CONFIG: functools.partial(_from_config, asks_for_all=False)}
