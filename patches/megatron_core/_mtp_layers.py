"""Where the layers of multi-token prediction (MTP) lie on the stages of a pipeline, and where forks give it labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shim.patches._arguments import Function, argument, parameters_of


def has_layout(config: Any) -> bool:
    """Whether layers have a free layout over pipeline stages. From 0.16 on any stage may have MTP layers."""
    return getattr(config, "pipeline_model_parallel_layout", None) is not None


def layers_on_earlier_stages(config: Any, vp_stage: int | None) -> int:
    """How many MTP layers earlier stages hold. Only a layout (0.16 and later) can put MTP layers there."""
    if not has_layout(config):
        return 0
    from megatron.core.transformer.multi_token_prediction import get_mtp_layer_offset

    if "vp_stage" not in inspect.signature(get_mtp_layer_offset).parameters:  # up to 0.15 all are on the last stage
        return 0
    return get_mtp_layer_offset(config, vp_stage)


def number_in_block(layer: Any) -> int:
    """The index of the layer among this pipeline stage's MTP layers. layer_number counts from 1 over all stages."""
    return layer.layer_number - 1 - layers_on_earlier_stages(layer.config, getattr(layer, "vp_stage", None))


def labels_of_forks(original: Function) -> Callable[..., Any] | None:
    """A getter for the tokens that forks for reinforcement learning (slime, miles) give a model's MTP in `mtp_kwargs`.

    MTP is not trained if a call has none, whatever its `labels`. None: the function is that of no such fork.
    """
    if "mtp_kwargs" not in parameters_of(original):
        return None
    given = argument(original, "mtp_kwargs")
    return lambda args, kwargs: (given(args, kwargs) or {}).get("mtp_labels")
