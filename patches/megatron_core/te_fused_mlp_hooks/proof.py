"""Proof of te-fused-mlp-hooks. Layers and DistributedDataParallel are megatron-core's; no operation of a layer runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

from torch import nn

from shim import testing
from shim.testing.proof import CannotRunError, Here, proof

CLASSES = ("TEFusedMLP", "TEFusedResidualRMSNorm")


def layers() -> list[Any]:
    """A layer of each class of this release, with two trained parts and nothing else."""
    extensions: Any = import_module("megatron.core.extensions.transformer_engine")
    classes: list[Any] = [found for name in CLASSES if isinstance(found := getattr(extensions, name, None), type)]
    made = []
    for kind in classes:
        if not hasattr(kind, "_register_hooks_on_fused_impl"):
            continue
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        layer.first, layer.second = nn.Linear(2, 2), nn.Linear(2, 2)
        made.append(layer)
    if not made:
        raise CannotRunError("this release has no layer that runs the hooks of its parts")
    return made


def wrapped(layer: Any) -> Any:
    """In DistributedDataParallel, whose hooks wait for the all-gather of weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True
    )
    config = testing.build_gpt(num_layers=1, mtp_num_layers=None).config
    return DistributedDataParallel(config, ddp, layer)


def waits(whole: Any, fused: nn.Module) -> int:
    """How often a forward of the fused operations waits for an all-gather."""
    buckets = {id(group): group for group in whole.param_to_bucket_group.values()}.values()
    with mock.patch.object(type(next(iter(buckets))), "finish_param_sync") as waited:
        fused(None)
    return waited.call_count


def wrong_waits(first: bool) -> int:
    """Waits of forwards, with the hooks on and off, that are missing or too many. first: in the first they are on."""
    wrong = 0
    for layer in layers():
        whole, fused = wrapped(layer), nn.Identity()
        if not first:
            whole.disable_forward_pre_hook(param_sync=False)
        layer._register_hooks_on_fused_impl(fused)  # the first forward does so
        for on in (first, not first, first):
            if on != bool(whole.remove_forward_pre_hook_handles):
                whole.enable_forward_pre_hook() if on else whole.disable_forward_pre_hook(param_sync=False)
            wrong += abs(waits(whole, fused) - (4 if on else 0))
    return wrong


@proof("{:.0f} waits missing or too many", right="as many waits as parts have", te=True)
def hooks_that_are_off_at_first_run_later(here: Here) -> int:
    """A TEFusedMLP never waits for the all-gather of its weights if DDP's hooks are off in its first forward.

    To reproduce: wrap a model with `use_transformer_engine_op_fuser=True` in DistributedDataParallel with
    `overlap_param_gather=True`, call `disable_forward_pre_hook()`, as megatron.training does before its first step, run
    a forward, call `enable_forward_pre_hook()`, and count the calls of `finish_param_sync` in the next forward. It has
    none for the weights of linear_fc1 and linear_fc2, which the all-gather may still be writing. TEFusedResidualRMSNorm
    does the same from 0.17 on.

    `_register_hooks_on_fused_impl` puts the hooks of that moment in a list. Right is to look at each forward. Fixed
    on main by pull request 6132.
    """
    return int(here.run(wrong_waits, False)[0])


@proof("{:.0f} waits missing or too many", right="as many waits as parts have", te=True)
def hooks_that_are_on_at_first_stop(here: Here) -> int:
    """A TEFusedMLP runs DDP's hooks after they were disabled, if they were on in its first forward.

    To reproduce: as above, with the hooks on in the first forward and disabled for a later one, as for an evaluation.
    They still wait, and dispatch all-gathers.
    """
    return int(here.run(wrong_waits, True)[0])
