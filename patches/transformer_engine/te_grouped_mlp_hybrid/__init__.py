"""Grouped MLPs in MXFP8 are fused only if their gradients are in E4M3.

What is wrong (2.14 to 2.19): the operation that fuses a grouped linear layer, its activation and another grouped linear
layer, as use_transformer_engine_op_fuser of megatron-core has it, takes each MXFP8 recipe. With Format.HYBRID gradients
are quantized to E5M2, and its backward reads their bytes as E4M3: other numbers, in silence.

The patch: with such a recipe operations stay as they are, as in 2.20, and compute one by one. The default of MXFP8 is
E4M3, which is fused as before.

Not covered: operations that are fused already stay so if a later region has another format of the same recipe.

Upstream: issue 3342, fixed by pull request 3352 in 2.20.

Delete when: Transformer Engine 2.19 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

FUSE = {
    "v2_14": "transformer_engine.pytorch.ops._common:fuse_grouped_mlp_ops",
    "v2_17": "transformer_engine.pytorch.ops.fused.grouped_mlp:fuse_grouped_mlp_ops",
}


def _of_e4m3(original: Function) -> Function:
    ops_of, recipe_of = argument(original, "ops"), argument(original, "recipe")

    @functools.wraps(original)
    def fuse_grouped_mlp_ops(*args: Any, **kwargs: Any) -> Any:
        recipe = recipe_of(args, kwargs)
        if recipe is not None and recipe.mxfp8() and recipe.fp8_format.name != "E4M3":
            return ops_of(args, kwargs)
        return original(*args, **kwargs)

    return fuse_grouped_mlp_ops


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FUSE[variant]: _of_e4m3}
