"""Proofs of layout-pp-rank."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, LacksFeatureError, proof

# One decoder layer on the first of two stages, and three on the second. No number is the same on both.
STAGES = [["embedding", "decoder"], ["decoder"] * 3 + ["loss"]]
PREDICTING = [["embedding", "decoder"], ["decoder"] * 3 + ["mtp", "loss"]]
LAYERS = 4
NUMBERS = [[1], [2, 3, 4]]


def need_rank() -> None:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if "pp_rank" not in inspect.signature(get_transformer_layer_offset).parameters:
        raise LacksFeatureError("these functions take no pp_rank in this release")


def said(config: Any, rank: int | None) -> tuple[int, int]:
    """The layers before a stage, and those of the stage. rank: whose, None for the own one."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return get_transformer_layer_offset(config, pp_rank=rank), get_num_layers_to_build(config, pp_rank=rank)


def config_of(stages: list[list[str]], **fields: Any) -> Any:
    """The config of as many stages. They have these layers, unless the fields say that there is no layout."""
    from megatron.core.transformer import TransformerConfig

    fields = {"pipeline_model_parallel_layout": [list(stage) for stage in stages], **fields}
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=len(stages),
        pipeline_dtype=torch.float32,
        **fields,
    )


def said_of_each_stage() -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """What a rank says of itself, and of each stage."""
    need_rank()
    config = config_of(STAGES)
    return said(config, None), [said(config, rank) for rank in range(len(STAGES))]


def prediction_layers_of_each_stage(**fields: Any) -> list[int]:
    """How many layers of multi-token prediction each stage has, as a rank says."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build

    if "pp_rank" not in inspect.signature(get_mtp_num_layers_to_build).parameters:
        raise LacksFeatureError("get_mtp_num_layers_to_build takes no pp_rank in this release")
    config = config_of(PREDICTING, mtp_num_layers=1, **fields)
    return [get_mtp_num_layers_to_build(config, pp_rank=rank) for rank in range(len(PREDICTING))]


def built_layers() -> list[int]:
    """The numbers of this rank's layers, of a model whose pipeline group parallel_state does not know."""
    need_rank()
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = dist.new_group(list(range(len(STAGES))))
    dist.barrier()  # one rank would free the group while the other still connects
    try:
        model: Any = testing.build_gpt(
            num_layers=LAYERS,
            mtp_num_layers=None,
            share_embeddings_and_output_weights=False,
            expert_model_parallel_size=1,
            pipeline_model_parallel_size=len(STAGES),
            pipeline_model_parallel_layout=[list(stage) for stage in STAGES],
            pre_process=dist.get_rank() == 0,
            post_process=dist.get_rank() == len(STAGES) - 1,
            model_kwargs={"pg_collection": groups},
        )
    finally:
        dist.destroy_process_group(groups.pp)
    return [layer.layer_number for layer in model.decoder.layers]


@proof("{:.0f} of 8 numbers are another stage's", right="as each stage says", ranks=2)
def each_stage_is_told_of_the_others(here: Here) -> int:
    """With pipeline_model_parallel_layout, functions that take a `pp_rank` answer for the rank's own stage.

    To reproduce: on two pipeline ranks, make a TransformerConfig with four layers and
    `pipeline_model_parallel_layout=[["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]]`. Call
    `get_transformer_layer_offset(config, pp_rank=rank)` and `get_num_layers_to_build(config, pp_rank=rank)` for both
    ranks, on each rank. A rank says of the other stage what is right for its own.

    Both functions call the layout's methods without `pp_rank`, although these take it. Right is what each rank says of
    itself.

    From 0.15 to 0.20.
    """
    found = here.run(said_of_each_stage, layout=Layout(pp=len(STAGES)))
    right = [own for own, _ in found]
    return sum(
        number != truth
        for _, stages in found
        for stage, own in zip(stages, right, strict=True)
        for number, truth in zip(stage, own, strict=True)
    )


@proof("{:.0f} of 4 numbers are another stage's", right="as the layout says", ranks=2, variants=("v0_16",))
def each_stage_is_told_of_the_others_prediction_layers(here: Here) -> int:
    """With pipeline_model_parallel_layout, `get_mtp_num_layers_to_build` answers for the rank's own stage.

    To reproduce: on two pipeline ranks, make a TransformerConfig with four layers, `mtp_num_layers=1` and
    `pipeline_model_parallel_layout=[["embedding", "decoder"], ["decoder", "decoder", "decoder", "mtp", "loss"]]`. Call
    `get_mtp_num_layers_to_build(config, pp_rank=rank)` for both ranks, on each rank. The first rank says none of both,
    and the second one of both.

    It calls the layout's method without `pp_rank`, although that takes it. Right are none on the first stage, and one
    on the second.

    From 0.16 to 0.20.
    """
    found = here.run(prediction_layers_of_each_stage, layout=Layout(pp=len(PREDICTING)))
    right = [stage.count("mtp") for stage in PREDICTING]
    return sum(number != truth for stages in found for number, truth in zip(stages, right, strict=True))


def without_layout() -> list[int]:
    return prediction_layers_of_each_stage(pipeline_model_parallel_layout=None)


@proof("{:.0f} of 4 numbers are another stage's", right="the last stage has them", ranks=2, variants=("v0_16",))
def each_stage_is_told_of_the_others_prediction_layers_without_a_layout(here: Here) -> int:
    """`get_mtp_num_layers_to_build` does not read its `pp_rank`, also without a layout.

    To reproduce: on two pipeline ranks, make a TransformerConfig with four layers, `mtp_num_layers=1` and
    `pipeline_model_parallel_size=2`. Call `get_mtp_num_layers_to_build(config, pp_rank=rank)` for both ranks, on each
    rank. The first rank says none of both, and the second one of both. So `get_gpt_mtp_block_spec(..., pp_rank=rank)`
    gives the wrong stage's block.

    It asks `parallel_state.is_pipeline_last_stage`. Right are none on the first stage, and one on the second.

    From 0.16 to 0.20.
    """
    found = here.run(without_layout, layout=Layout(pp=len(PREDICTING)))
    return sum(number != truth for stages in found for number, truth in zip(stages, (0, 1), strict=True))


@proof("{:.0f} of 4 layers are not built", right="each layer is built once", ranks=2)
def a_model_with_a_pipeline_group_of_its_own_has_all_layers(here: Here) -> int:
    """With pipeline_model_parallel_layout, a model with a separate pipeline group lacks layers.

    To reproduce: on two ranks, call `parallel_state.initialize_model_parallel()` without pipeline parallelism, and make
    a ProcessGroupCollection whose `pp` is a group of both ranks. Build a GPTModel with it, with four layers,
    `pipeline_model_parallel_size=2` and
    `pipeline_model_parallel_layout=[["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]]`. Both ranks
    have one layer with the number 1, as rank 0 should. Without a layout the model has its four layers.

    TransformerBlock and TransformerLayer pass the rank in the given group as `pp_rank` to `get_num_layers_to_build` and
    `get_transformer_layer_offset`, which do not pass it on to the layout. Right are layer 1 on the first rank, and 2 to
    4 on the second.

    From 0.15 to 0.20.
    """
    found = here.run(built_layers, layout=Layout(ep=len(STAGES)))  # two ranks, without pipeline parallelism
    return sum(layer not in built for built, right in zip(found, NUMBERS, strict=True) for layer in right)
