"""Proof of fsdp-optimizer-state."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shim.testing.proof import CannotRunError, Here, proof

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
STEPS = 3
SETTINGS = {"lr": 0.1, "weight_decay": 0.1}


def sharded(optimizer: Any) -> Any:
    """What fully_shard_optimizer makes of the optimizer. An object stands for the model whose weights it steps on."""
    try:
        shard = import_module(FSDP + ".fully_shard").fully_shard_optimizer
    except ModuleNotFoundError as error:
        raise CannotRunError("this release has no fully_shard_optimizer") from error
    if "model" in inspect.signature(shard).parameters:
        raise CannotRunError("fully_shard_optimizer of this release takes a model on GPUs, and no step")
    model = SimpleNamespace(
        model_auto_sync=True,
        install_optimized_model_weights=lambda: None,
        finish_grad_sync=lambda: None,
        zero_grad_buffer=lambda: None,
    )
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight._megatron_fsdp_model = model
    return shard(optimizer)


def weights(count: int = 2) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(8, generator=generator)) for _ in range(count)]


def trained(shards: bool, kind: Any = torch.optim.AdamW, **settings: Any) -> Tensor:
    """All weights after some steps."""
    model = weights()
    optimizer = kind(model, **{**SETTINGS, **settings})
    if shards:
        optimizer = sharded(optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for weight in model:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return torch.cat([weight.detach() for weight in model])


def error(kind: Any, **settings: Any) -> float:
    """How far the weights are from those that the same optimizer trains alone, over how far it has moved them."""
    expected = trained(False, kind, **settings)
    moved = expected - torch.cat([weight.detach() for weight in weights()])
    return float((trained(True, kind, **settings) - expected).norm() / moved.norm())


@proof("weights off by {:.1e}", right="weights as the optimizer alone trains them")
def a_sharded_optimizer_begins_with_its_first_step(here: Here) -> float:
    """fully_shard_optimizer of Megatron-FSDP trains weights before the training.

    To reproduce: pass `torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1)` to fully_shard_optimizer, and look at the
    weights and at the state: they are multiplied by 0.99, and the step is 1. With Adam each has moved by 0.1, the
    learning rate. On a CPU, an object with the methods of MegatronFSDP has to stand in `_megatron_fsdp_model` of the
    weights.

    It takes a step on gradients of zero to have a state into which a checkpoint can be loaded. Right is a training that
    begins with the weights of the model and with Adam's first step: measured is the distance after three steps, over
    the distance that they cover. Fixed on main by Megatron-LM pull request 5976.
    """
    return max(here.run(error, kind)[0] for kind in (torch.optim.AdamW, torch.optim.Adam))
