"""The multiples that a packed row must have: for quantized matrix products, sequence and context parallelism."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["fp8_alignment"]

# Tokens that a rank must have a multiple of, by the name in megatron-core's config (fp8_recipe, fp4_recipe).
_BY_NAME = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 128}
# The same by the class of Transformer Engine's recipe.
_BY_CLASS = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "tensorwise",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}


def fp8_alignment(
    recipe: Any, tp: int = 1, cp: int = 1, sequence_parallel: bool = False, *, tokens_per_rank: int = 1
) -> int:
    """The multiple for the length T of a packed row, padding and all context-parallel ranks included.

    recipe: of the tokens' quantization. None without quantization; a name as in megatron-core's `fp8_recipe` and
        `fp4_recipe` ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4", or a member of its enumerations); or a
        recipe object of Transformer Engine, which is known by the names of its classes.
    tp, cp: sizes of the tensor- and the context-parallel group.
    sequence_parallel: whether the tokens of a rank are split over its tensor-parallel group.
    tokens_per_rank: a further multiple for the tokens of each rank, such as 128 for a dispatcher with chunks of 128.

    Each rank holds T / cp tokens, under sequence parallelism T / (cp * tp). That many must be a multiple m of:

    =====================  ===  =====================================================================================
    recipe                   m  source
    =====================  ===  =====================================================================================
    delayed, tensorwise     16  megatron-core, `fp8_utils.get_fp8_align_size`; Transformer Engine 2.11 and later,
                                `quantization.get_align_size_for_quantization`, and before `module.fp8_padding`. The
                                tokens are the inner dimension of the product for weight gradients.
    mxfp8                   32  the same functions; `MXFP8Quantizer` raises for other token counts
    blockwise              128  Transformer Engine, `Float8BlockQuantizer.is_quantizable` (from 2.5). Under sequence
                                parallelism other token counts are gathered in high precision. The functions above
                                say 16: they are about experts' tokens, which are not gathered.
    nvfp4                  128  megatron-core, `fp4_utils.get_fp4_align_size`; Transformer Engine from 2.15
                                (2.11 to 2.14 said 64). `NVFP4Quantizer` itself takes multiples of 16.
    CustomRecipe object      -  its `quantization_alignment`, from Transformer Engine 2.19
    None                     1
    =====================  ===  =====================================================================================

    Context parallelism cuts every sequence into 2 * cp chunks (Transformer Engine, `attn_forward_func_with_cp`). So T
    is a multiple of 2 * cp as well, and the result is the least common multiple of 2 * cp (1 without context
    parallelism) and cp * m * (tp under sequence parallelism). The cp before m is needed: T = 32 with "mxfp8" and cp = 2
    would leave each rank 16 tokens.

    The result is for the row. A sequence inside it needs 2 * cp only, which `Packing` takes care of.

    ValueError for an unknown recipe, for the name "custom", which says nothing about tokens, and for sizes below 1.
    """
    for name, size in (("tp", tp), ("cp", cp), ("tokens_per_rank", tokens_per_rank)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    on_rank = math.lcm(_tokens_of(recipe), tokens_per_rank) * (tp if sequence_parallel else 1)
    return math.lcm(2 * cp if cp > 1 else 1, cp * on_rank)


def _tokens_of(recipe: Any) -> int:
    """The multiple that the tokens of one rank must have before a product."""
    if recipe is None:
        return 1
    if isinstance(recipe, str):
        if recipe in _BY_NAME:
            return _BY_NAME[recipe]
        raise ValueError(
            f"the recipe {str(recipe)!r} has no known alignment; known are {', '.join(_BY_NAME)} and None. For another "
            "recipe pass None and tokens_per_rank, or Transformer Engine's recipe object"
        )
    said = getattr(recipe, "quantization_alignment", None)
    if isinstance(said, int):
        return said
    for base in type(recipe).__mro__:
        if base.__name__ in _BY_CLASS:
            return _BY_NAME[_BY_CLASS[base.__name__]]
    raise ValueError(
        f"a recipe of class {type(recipe).__name__} has no known alignment; known are {', '.join(_BY_CLASS)}. For "
        "another recipe pass None and tokens_per_rank"
    )
