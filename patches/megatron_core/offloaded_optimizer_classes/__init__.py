"""Checkpoints of the CPU-offloaded optimizer (`optimizer_cpu_offload`), whose parameter groups name classes.

What is wrong (0.14 to 0.20, but not 0.17.0): HybridDeviceOptimizer keeps the classes of its optimizers among its
defaults, and so in each parameter group. The formats fully_reshardable and fully_sharded_model_space write the groups
to common.pt, which is loaded with torch's `weights_only`. From torch 2.6 on that refuses all classes that nobody
allowed: UnpicklingError. So nothing of the checkpoint can be loaded, not even the weights. From 0.19 on common.pt is no
longer written, but files of older releases are still loaded, and raise.

The patch allows the classes that such groups can name, while common.pt is loaded and no longer: torch's AdamW and SGD,
and those that megatron.core.optimizer imported in their place from Transformer Engine or Apex. They are the classes
that it gives HybridDeviceOptimizer. torch still refuses everything else. The file is written as on stock.

Upstream: open. From 0.19 on a checkpoint has no common.pt. 0.12, 0.13 and 0.17.0 load any class, from any file.

Delete when: no checkpoint of a release before 0.19 is to be loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

COMMON = "megatron.core.dist_checkpointing.strategies.common:"
TARGETS = {"v0_14": COMMON + "TorchCommonLoadStrategy.load_common", "v0_17_1": COMMON + "load_common"}
NAMES = ("Adam", "SGD", "CPUAdam", "CPUSGD")  # in megatron.core.optimizer


def _load_common(original: Function) -> Function:
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5, which loads any class by default
        return original

    @functools.wraps(original)
    def load_common(*args: Any, **kwargs: Any) -> Any:
        with torch.serialization.safe_globals(_not_yet_allowed()):
            return original(*args, **kwargs)

    return load_common


def _not_yet_allowed() -> list[Any]:
    """The classes of a HybridDeviceOptimizer's optimizers. What somebody else allowed stays allowed afterwards."""
    optimizers = sys.modules.get("megatron.core.optimizer")
    classes = {torch.optim.AdamW, torch.optim.SGD, *(getattr(optimizers, name, None) for name in NAMES)} - {None}
    return [found for found in classes if found not in torch.serialization.get_safe_globals()]


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGETS[variant]: _load_common}
