"""Layers of another pipeline stage, by a pipeline_model_parallel_layout or of multi-token prediction.

What is wrong (0.15 to 0.20): three functions say which layers a pipeline stage has. Each takes the stage as `pp_rank`.
If the config has a pipeline_model_parallel_layout, they leave `pp_rank` out and answer for the rank's own stage:
- get_transformer_layer_offset, how many layers come before,
- get_num_layers_to_build, how many it has,
- get_mtp_num_layers_to_build, how many of multi-token prediction (MTP) it has, from 0.16 on.

Without a layout the first two answer for `pp_rank`. The third one does not read it at all, so that
`get_gpt_mtp_block_spec(..., pp_rank=rank)` gives another stage what the rank's own has. Two kinds of users meet it, in
silence:
- Asking for another stage, to name its layers in a checkpoint or to send their weights, returns the caller's own.
- A model with another pipeline group (`pg_collection.pp`) has the layers of parallel_state's stage on every rank.
  Without parallel_state such a model cannot be built.

The patch hands these functions a copy of the config, whose layout answers for `pp_rank` if the call names no other.
The layout's own methods take it. Without a layout, the patch gives the last stage the layers of multi-token prediction,
and every other one none, as upstream does for the own stage. Nothing happens to a call without `pp_rank`.

Left alone: get_mtp_layer_offset has no `pp_rank`. mtp_on_this_rank asks parallel_state.

Upstream: open. 0.12 to 0.14 take no `pp_rank`; moved-symbols adds it, and also answers for a layout.

Delete when: the supported releases pass pp_rank on to the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with

OFFSET = "megatron.core.transformer.transformer_layer:get_transformer_layer_offset"
LAYERS = "megatron.core.transformer.transformer_block:get_num_layers_to_build"
MTP_LAYERS = "megatron.core.transformer.multi_token_prediction:get_mtp_num_layers_to_build"


def _at_rank(original: Function) -> Function:
    config_of, put_config = argument(original, "config"), replacing(original, "config")
    rank_of = argument(original, "pp_rank")

    @functools.wraps(original)
    def at_rank(*args: Any, **kwargs: Any) -> Any:
        rank = rank_of(args, kwargs)
        if rank is not None:
            config = config_of(args, kwargs)
            if getattr(config, "pipeline_model_parallel_layout", None):
                args, kwargs = put_config(args, kwargs, _config_at(config, rank))
        return original(*args, **kwargs)

    return at_rank


def _prediction_layers_at_rank(original: Function) -> Function:
    by_layout = _at_rank(original)
    config_of, rank_of = argument(original, "config"), argument(original, "pp_rank")
    stage_of = argument(original, "vp_stage")

    @functools.wraps(original)
    def prediction_layers_at_rank(*args: Any, **kwargs: Any) -> Any:
        config, rank, stage = config_of(args, kwargs), rank_of(args, kwargs), stage_of(args, kwargs)
        virtual = config.virtual_pipeline_model_parallel_size or 1
        # Upstream says what is wrong with a call that names no virtual stage.
        unsaid = stage is None and virtual > 1
        if rank is None or unsaid or getattr(config, "pipeline_model_parallel_layout", None):
            return by_layout(*args, **kwargs)
        last = rank == config.pipeline_model_parallel_size - 1 and (stage or 0) == virtual - 1
        return config.mtp_num_layers or 0 if last else 0

    return prediction_layers_at_rank


def _config_at(config: Any, rank: int) -> Any:
    """A view of the config, whose layout answers for the pipeline rank `rank`."""
    layout = config.pipeline_model_parallel_layout
    names = ("get_layer_offset", "get_num_layers_to_build")
    at_rank = {name: functools.partial(getattr(layout, name), pp_rank=rank) for name in names}
    return view_with(config, pipeline_model_parallel_layout=view_with(layout, **at_rank))


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    found = dict.fromkeys((OFFSET, LAYERS), _at_rank)
    return found if variant == "v0_15" else {**found, MTP_LAYERS: _prediction_layers_at_rank}
