"""Proof of hybrid-uneven-stages."""

from __future__ import annotations

from typing import Any

import torch

from shim.patches.megatron_core._proof_mamba import module_of_stack
from shim.testing.layout import Layout
from shim.testing.proof import CannotRunError, Here, proof

PATTERN = list("M*M-M*")  # Mamba, attention, MLP
FIRST = 2


def config_of(first: int | None, last: int | None) -> Any:
    """Of a hybrid model on the stages of this layout."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=len(PATTERN),
        hidden_size=32,
        num_attention_heads=4,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )


def selected(first: int | None, last: int | None) -> tuple[int, str]:
    """(number of the first layer, types of layers) of this stage of a hybrid stack, which is built without kernels."""
    from megatron.core import parallel_state

    block = module_of_stack()
    if not hasattr(block.MambaStack, "_select_layers_for_pipeline_parallel"):
        raise CannotRunError("the pattern of this release's hybrid stack says where stages begin")
    stack = block.MambaStack.__new__(block.MambaStack)
    torch.nn.Module.__init__(stack)
    stack.config = config_of(first, last)
    stack.pp_group = parallel_state.get_pipeline_model_parallel_group()
    start, types = stack._select_layers_for_pipeline_parallel(PATTERN)
    return start, "".join(types)


@proof("{:.0f} of 6 layers on another stage than asked", right="each stage has its layers", ranks=2)
def stages_have_the_layers_that_are_asked_for(here: Here) -> int:
    """A hybrid model ignores num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.

    To reproduce: build a MambaModel of six layers on two pipeline stages with `num_layers_in_first_pipeline_stage=2`,
    and count the layers of each stage. Both have three.

    `MambaStack._select_layers_for_pipeline_parallel` divides the number of layers by the number of stages. Attention
    and MLP layers number themselves by `get_transformer_layer_offset`, which knows both options, so that numbers of
    layers occur twice. Right are two layers on the first stage and four on the second.

    From 0.12 to 0.16.0. From 0.17 on the pattern of the model says where stages begin.
    """
    found = here.run(selected, FIRST, None, layout=Layout(pp=2))
    asked = [(0, "".join(PATTERN[:FIRST])), (FIRST, "".join(PATTERN[FIRST:]))]
    # As many as are built on one stage too many are missing on the other.
    return sum(abs(len(types) - len(right)) for (_, types), (_, right) in zip(found, asked)) // 2
