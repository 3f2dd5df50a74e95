"""Weights in fp32 under optimizer_cpu_offload with the distributed optimizer.

What is wrong (0.12 to 0.20): of each weight in fp32 the distributed optimizer steps on a slice that is made with
autograd, so it is no leaf. HybridDeviceOptimizer, which optimizer_cpu_offload asks for, is made of these slices, and
torch refuses them: "can't optimize a non-leaf Tensor". So no model in fp32, and none in bf16 with some weights in fp32,
such as routers or norms, can be trained so. Slices of weights in bf16 are made without autograd.

What the patch does: with optimizer_cpu_offload the slices are made without autograd. They are the same views.

Upstream: open, not reported.

Delete when: the distributed optimizer makes all slices without autograd, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument

BUILD = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups"


def _without_autograd(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def _build_model_and_main_param_groups(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not config_of(args, kwargs).optimizer_cpu_offload):
            return original(*args, **kwargs)

    return _build_model_and_main_param_groups


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BUILD: _without_autograd}
