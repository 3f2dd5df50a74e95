"""Checkpoints of the distributed optimizer whose sharding is not named.

What is wrong (0.16 to 0.20): without `metadata["distrib_optim_sharding_type"]`,
`DistributedOptimizer.sharded_state_dict` takes "fully_sharded_model_space". dist_checkpointing refuses it since 0.16:
saving and loading raise CheckpointingException, "ShardedTensor.flattened_range is not supported". A caller that was
right up to 0.15 cannot checkpoint an optimizer at all.

What the patch does: it takes "dp_reshardable" instead, as if the caller had named it. That is what Megatron-LM's own
training takes since 0.15, so that its checkpoints and these can be exchanged. It sends no messages and copies nothing.
"fully_reshardable" would gather the whole optimizer on every data-parallel rank, in fp32 and in host memory, or keep
all ranks but one from writing. "dp_reshardable" refuses with an error to load into another tensor- or pipeline-parallel
size, or with other buckets. If you need that, set the option `sharding: fully_reshardable`, or
name it (see reshardable-padding). If a sharding is named, also a wrong one, and with Megatron-FSDP, stock does it all.

A checkpoint of the old default, which 0.15 and earlier have written, cannot be loaded from 0.16 on, with and without
the patch. Weights in fp32 need dp-reshardable-fp32 as well.

Upstream: the default is the same on main.

Delete when: megatron-core's default can be saved, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
ONE = f"{DISTRIBUTED}:DistributedOptimizer.sharded_state_dict"
CHAINED = "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict"

NAME = "distrib_optim_sharding_type"


def _sharded_state_dict(original: Function, *, sharding: str) -> Function:
    metadata_of, with_metadata = argument(original, "metadata"), replacing(original, "metadata")
    named_of = argument(original, "sharding_type")

    @functools.wraps(original)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        metadata = metadata_of(args, kwargs) or {}
        if named_of(args, kwargs) is None and NAME not in metadata and _sharded_here(args[0]):
            args, kwargs = with_metadata(args, kwargs, {**metadata, NAME: sharding})
        return original(*args, **kwargs)

    return sharded_state_dict


def _sharded_state_dict_of_several(original: Function, *, sharding: str) -> Function:
    """The chain has to know it, too: by it the keys of its optimizers get a prefix, without which they meet."""

    @functools.wraps(original)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        metadata = kwargs.get("metadata") or {}
        if kwargs.get("sharding_type") is None and NAME not in metadata:
            kind = sys.modules[DISTRIBUTED].DistributedOptimizer
            if any(isinstance(each, kind) and _sharded_here(each) for each in args[0].chained_optimizers):
                kwargs = {**kwargs, "metadata": {**metadata, NAME: sharding}}
        return original(*args, **kwargs)

    return sharded_state_dict


def _sharded_here(optimizer: Any) -> bool:
    """Megatron-FSDP has its own sharding, and refuses any other."""
    return not optimizer.ddp_config.use_megatron_fsdp


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    sharding = options["sharding"]
    return {
        ONE: functools.partial(_sharded_state_dict, sharding=sharding),
        CHAINED: functools.partial(_sharded_state_dict_of_several, sharding=sharding),
    }
