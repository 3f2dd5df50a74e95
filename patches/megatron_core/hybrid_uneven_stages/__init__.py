"""Pipeline stages of hybrid models that are not all of one size.

What is wrong (0.12 to 0.16.0): MambaStack gives every pipeline stage as many layers as the others, whatever
`num_layers_in_first_pipeline_stage` and `num_layers_in_last_pipeline_stage` ask for. Attention and MLP layers number
themselves as asked. So stages have other layers than asked, without a word, and numbers of layers occur twice, which
name weights in checkpoints.

The patch takes the place and the number of a stage's layers from the functions of upstream by which transformer layers
number themselves, if either option is set. Stages of one size are cut by upstream's own function.

Upstream: fixed in 0.16.1 (Megatron-LM issue 3399).

Delete when: 0.12 to 0.16.0 are not supported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

SELECT = "megatron.core.ssm.mamba_block:MambaStack._select_layers_for_pipeline_parallel"
OFFSET = "megatron.core.transformer.transformer_layer", "get_transformer_layer_offset"
COUNT = "megatron.core.transformer.transformer_block", "get_num_layers_to_build"


def _of_stage(where: tuple[str, str], stack: Any) -> int:
    """What upstream's function says of the stage of this rank."""
    module, name = where
    function = vars(sys.modules[module])[name]
    # Up to 0.14 it takes the rank of the process.
    rank = {"pp_rank": stack.pp_group.rank()} if "pp_rank" in inspect.signature(function).parameters else {}
    found: int = function(stack.config, **rank)
    return found


def _select_layers(original: Function) -> Function:
    layers_of = argument(original, "layer_type_list")

    @functools.wraps(original)
    def select(*args: Any, **kwargs: Any) -> Any:
        stack, config = args[0], args[0].config
        if config.num_layers_in_first_pipeline_stage is None and config.num_layers_in_last_pipeline_stage is None:
            return original(*args, **kwargs)
        original(*args, **kwargs)  # which refuses virtual stages
        start = _of_stage(OFFSET, stack)
        return start, layers_of(args, kwargs)[start : start + _of_stage(COUNT, stack)]

    return select


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SELECT: _select_layers}
