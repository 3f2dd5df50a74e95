"""Proof of te-grouped-mlp-hybrid. Operations and their fusion are Transformer Engine's; the kernels are not run."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

import torch

from shim import testing
from shim.testing.proof import CannotRunError, Here, proof

GROUPS, SIZE = 2, 256  # what can be fused is a multiple of 256
PLACES = ("transformer_engine.pytorch.ops.fused.grouped_mlp", "transformer_engine.pytorch.ops._common")


class Fused:
    """Stands in for the operation that a GPU has kernels for."""

    is_supported = classmethod(lambda cls: True)

    def __init__(self, **parts: Any) -> None:
        self.parts = parts


def recipe_of(name: str) -> Any:
    recipe: Any = import_module("transformer_engine.common.recipe")
    return recipe.MXFP8BlockScaling(fp8_format=getattr(recipe.Format, name))


def is_fused(name: str) -> bool:
    """Whether two grouped linear layers and their SwiGLU become one operation with MXFP8 of this format."""
    for place in PLACES:
        try:
            fuse = import_module(place).fuse_grouped_mlp_ops
            break
        except (AttributeError, ImportError):
            continue
    else:
        raise CannotRunError("this release fuses no grouped MLP")
    ops: Any = import_module("transformer_engine.pytorch.ops")
    how = {"bias": False, "dtype": torch.bfloat16, "device": "cpu"}
    with testing.te_cuda_stand_ins(), mock.patch.object(torch.cuda, "is_available", lambda: True):
        layers = [
            ops.GroupedLinear(GROUPS, SIZE, 2 * SIZE, **how),
            ops.ScaledSwiGLU(glu_interleave_size=32),
            ops.GroupedLinear(GROUPS, SIZE, SIZE, **how),
        ]
        # What 2.20 asks for has a default before, or is not there.
        named = (
            {"activation_op_types": (ops.ScaledSwiGLU,)} if "activation_op_types" in signature(fuse).parameters else {}
        )
        found = fuse(layers, recipe=recipe_of(name), fused_op_cls=Fused, **named)
    return len(found) == 1 and isinstance(found[0], Fused)


def misread(name: str) -> float:
    """How far gradients are off after the fused backward has read their bytes as E4M3, over their norm."""
    if not is_fused(name):
        return 0.0
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.float8_e5m2)
    read = gradient.view(torch.float8_e4m3fn).float()
    true = gradient.float()
    return float((read.nan_to_num() - true).norm() / true.norm())


@proof("gradients off by {:.2f}", right="not fused", te=True)
def gradients_are_read_in_their_format(here: Here) -> float:
    """A fused grouped MLP in MXFP8 with Format.HYBRID reads gradients in E5M2 as E4M3.

    To reproduce: `te.ops.Sequential(GroupedLinear, ScaledSwiGLU(glu_interleave_size=32), GroupedLinear)` inside
    `te.autocast` with `MXFP8BlockScaling(fp8_format=Format.HYBRID)`, on a GPU whose cuDNN has the fused kernels.
    Compare the gradients with those of the operations one by one.

    `fuse_grouped_mlp_ops` looks whether the recipe is MXFP8, and not at its format. The backward gives the bytes of the
    output's gradient to a kernel as E4M3. Right is not to fuse, as from 2.20 on (issue 3342). Without a GPU this
    measures what the bytes of random numbers become.
    """
    return float(here.run(misread, "HYBRID")[0])
