"""Proof of te-softmax-offset: the sinks of Transformer Engine's own DotProductAttention, without a GPU."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

import torch

from shim.testing.cpu import unwritten_memory_is_nan
from shim.testing.proof import Here, LacksFeatureError, proof

HEADS, HEAD = 4, 8


def attention(softmax_type: str = "learnable", **arguments: Any) -> Any:
    """A DotProductAttention that is built in such memory."""
    built: Any = import_module("transformer_engine.pytorch").DotProductAttention
    if "softmax_type" not in signature(built.__init__).parameters:
        raise LacksFeatureError("attention has no learnable sinks in this release")
    with unwritten_memory_is_nan(), mock.patch.object(torch.cuda, "is_available", lambda: True):
        return built(HEADS, HEAD, attention_dropout=0.0, softmax_type=softmax_type, **arguments)


@proof("{:.0f} of 4 sinks are what was in memory", right="all sinks are zero", te=True)
def learnable_sinks_begin_as_zeros(here: Here) -> int:
    """Learnable attention sinks of Transformer Engine start as uninitialised memory.

    To reproduce: build `DotProductAttention(4, 8, softmax_type="learnable")`, on a GPU under
    `torch.use_deterministic_algorithms(True)`, which fills uninitialised memory with NaN, and look at `softmax_offset`.
    megatron-core builds it so for the config's `softmax_type="learnable"`.

    The parameter is made by `torch.empty`. Other modules call `reset_parameters` in their constructor, and this one
    does not. Right are zeros, as in Transformer Engine's JAX layer, and from 2.14 on (pull request 2694).
    """
    return sum(found != 0 for found in here.run(lambda: attention().softmax_offset.tolist())[0])
