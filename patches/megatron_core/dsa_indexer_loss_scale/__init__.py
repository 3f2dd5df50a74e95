"""The loss of DSA's indexer over microbatches.

What is wrong (0.16 to 0.18): the pipeline schedules tell the loss of the indexer (experimental_attention_variant="dsa")
no scale, as they tell those of MoE and multi-token prediction theirs. Its gradient counts once for each microbatch,
instead of the mean, and so grows with their number. Under fp16 it lacks the factor of the loss scaler, by which all
gradients are divided later, and vanishes.

The patch: after the schedule has computed the loss of a microbatch it sets the scale of the indexer's loss, as 0.19
does: that of the loss scaler, divided by the number of microbatches unless calculate_per_token_loss is set. DSA of
these releases knows no context parallelism, so there is no factor of it. Nothing happens for other models. The scale is
one number for the process (DSAIndexerLossAutoScaler.main_loss_backward_scale); it is forgotten when the patch goes.

Upstream: Megatron-LM pull requests 4070 and 5244, in 0.19.

Delete when: 0.19 is the oldest supported release.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function, argument

TARGET = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
SCALE = "main_loss_backward_scale"


def _scaler() -> Any:
    """DSAIndexerLossAutoScaler; None where no model with DSA was built."""
    return getattr(sys.modules.get(DSA), "DSAIndexerLossAutoScaler", None)


def _forward_step_calc_loss(original: Function) -> Function:
    config_of, number_of = argument(original, "config"), argument(original, "num_microbatches")

    @functools.wraps(original)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        config, scaler = config_of(args, kwargs), _scaler()
        if scaler is not None and getattr(config, "experimental_attention_variant", None) == "dsa":
            output = result[0][0] if isinstance(result[0], list) else result[0]
            device = output.device if isinstance(output, torch.Tensor) else None
            scale = torch.ones(1, device=device)
            if config.grad_scale_func is not None:
                scale = config.grad_scale_func(scale)
            if not config.calculate_per_token_loss:
                scale = scale / number_of(args, kwargs)
            # Upstream copies into the scale that is there, which may be of shape [] or [1].
            scaler.set_loss_scale(scale.detach().reshape(()))
        return result

    return forward_step_calc_loss


def _told() -> str:
    scale = getattr(_scaler(), SCALE, None)
    return "" if scale is None else "the scale of the indexer's loss"


def _forget() -> None:
    if _told():
        setattr(_scaler(), SCALE, None)


def bindings(variant: str, options: Mapping[str, Any]) -> Bindings:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return Bindings({TARGET: _forward_step_calc_loss}, Resource(_told, _forget))
