"""Weights in fp32 under optimizer_cpu_offload with the distributed optimizer.

What is wrong (0.12 to 0.20): of each weight in fp32 the distributed optimizer steps on a slice that is made with
autograd, so it is no leaf. HybridDeviceOptimizer, which optimizer_cpu_offload asks for, is made of these slices, and
torch refuses them: "can't optimize a non-leaf Tensor". So no model in fp32, and none in bf16 with some weights in fp32,
such as routers or norms, can be trained so. Slices of weights in bf16 are made without autograd.

Behind that lies a second defect: with use_precision_aware_optimizer gradients are in `decoupled_grad`, from where
HybridDeviceOptimizer gives them to copies on the CPU, and to copies in fp32. A weight in fp32 that stays on the GPU has
no copy. It never moves.

What the patch does: with optimizer_cpu_offload the slices are made without autograd. They are the same views. Weights
without a copy get their gradients, which are not copied.

Upstream: open, not reported.

Delete when: the distributed optimizer makes all slices without autograd, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shim.patches._arguments import Function, argument

BUILD = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups"
GIVE = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._set_sub_optimizer_grads"


class _ViewsWithoutAutograd(TorchFunctionMode):
    """Views of parameters are leaves. Those that are made under no_grad cannot be changed in place by a load."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and isinstance(args[0], torch.nn.Parameter):
            args = (args[0].detach(), *args[1:])
        return func(*args, **(kwargs or {}))


def _without_autograd(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def _build_model_and_main_param_groups(*args: Any, **kwargs: Any) -> Any:
        with _ViewsWithoutAutograd() if config_of(args, kwargs).optimizer_cpu_offload else nullcontext():
            return original(*args, **kwargs)

    return _build_model_and_main_param_groups


def _also_of_its_own(original: Function) -> Function:
    @functools.wraps(original)
    def _set_sub_optimizer_grads(*args: Any, **kwargs: Any) -> Any:
        for weight, stepped_on in args[0].param_to_inner_param.items():
            if stepped_on is weight and hasattr(weight, "decoupled_grad"):
                given = weight.decoupled_grad
                weight.grad = None if given is None else given.to(weight.dtype)
        return original(*args, **kwargs)

    return _set_sub_optimizer_grads


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BUILD: _without_autograd, GIVE: _also_of_its_own}
