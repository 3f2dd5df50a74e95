"""Settings of recompute, and checkpoints without Transformer Engine, for proofs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

NORMS: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}


class Quantization:
    """As FP8GlobalStateManager of Transformer Engine, which CheckpointWithoutOutput asks also without it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    get_fp8_recipe = is_fp8_enabled


@contextlib.contextmanager
def checkpoints_without_te() -> Iterator[Any]:
    """Let CheckpointWithoutOutput run without Transformer Engine; its module."""
    random = import_module("megatron.core.tensor_parallel.random")
    stand_ins = {
        "FP8GlobalStateManager": Quantization,
        "fp8_autocast": lambda **_: contextlib.nullcontext(),
        "activation_recompute_forward": lambda **_: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(random, name, value, create=True))
        yield random
