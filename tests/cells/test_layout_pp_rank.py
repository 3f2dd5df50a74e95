"""layout-pp-rank: a stage is told of the others, on virtual stages and with multi-token prediction too."""

from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig, multi_token_prediction, transformer_block, transformer_layer
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.layout_pp_rank.proof import LAYERS, NUMBERS, STAGES, built_layers, said
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ID = "layout-pp-rank"
pytestmark = needed(ID)
with_mtp = pytest.mark.skipif(shim.plan()[ID].variant != "v0_16", reason="it asks no layout for multi-token prediction")
# Of two ranks, with two virtual stages each: the first stages of both come before the second ones.
VIRTUAL = [["embedding", "decoder"], ["decoder"] * 2, ["decoder"] * 3, ["decoder"] * 4 + ["mtp", "loss"]]


@pytest.fixture
def on():
    with shim.patched(only=[ID], require=[ID]):
        yield


def config_of(stages=STAGES, ranks=2, **fields):
    """The config of `ranks` pipeline ranks. stages: a list of layers for each (virtual) stage, None for no layout."""
    layers = sum(stage.count("decoder") for stage in stages) if stages else LAYERS
    return TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout=stages and [list(stage) for stage in stages],
        **fields,
    )


def virtual():
    return mock.patch.object(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)


def virtual_config():
    return config_of(VIRTUAL, virtual_pipeline_model_parallel_size=2, mtp_num_layers=1)


def test_virtual_stages(on, one_rank):
    config, found = virtual_config(), {}
    with virtual():
        for stage in (0, 1):
            for rank in (0, 1):
                offset = transformer_layer.get_transformer_layer_offset(config, stage, rank)
                found[stage, rank] = offset, transformer_block.get_num_layers_to_build(config, stage, rank)
    assert found == {(0, 0): (0, 1), (0, 1): (1, 2), (1, 0): (3, 3), (1, 1): (6, 4)}


@with_mtp
def test_multi_token_prediction(on, one_rank):
    config = virtual_config()
    ask = multi_token_prediction.get_mtp_num_layers_to_build
    with virtual():
        found = {(stage, rank): ask(config, vp_stage=stage, pp_rank=rank) for stage in (0, 1) for rank in (0, 1)}
        assert ask(config, vp_stage=1) == 0
    assert found == {(0, 0): 0, (0, 1): 0, (1, 0): 0, (1, 1): 1}


@with_mtp
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_multi_token_prediction_without_a_layout(on, one_rank, ranks, stages):
    """All of it is on the last stage, as get_num_layers_to_build counts them."""
    fields = {"virtual_pipeline_model_parallel_size": stages} if stages > 1 else {}
    config = config_of(None, ranks=ranks, mtp_num_layers=2, **fields)
    ask = multi_token_prediction.get_mtp_num_layers_to_build
    places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    assert [ask(config, stage, rank) for stage, rank in places] == [0] * (len(places) - 1) + [2]
    assert ask(config_of(None, ranks=ranks), 0, ranks - 1) == 0


@with_mtp
def test_multi_token_prediction_of_the_own_stage(on, one_rank):
    """A call without a rank, or without the virtual stage that it needs, is upstream's."""
    ask = multi_token_prediction.get_mtp_num_layers_to_build
    assert ask(config_of(None, mtp_num_layers=1)) == 1  # the only rank, whatever the config says
    config = config_of(None, mtp_num_layers=1, virtual_pipeline_model_parallel_size=2)
    with virtual(), mock.patch.object(parallel_state, "is_pipeline_last_stage", side_effect=LookupError):
        for rank in (None, 0):
            with pytest.raises(LookupError):
                ask(config, pp_rank=rank)


@with_mtp
def test_the_block_of_another_stage(on, one_rank):
    """get_gpt_mtp_block_spec asks by its own name."""
    from megatron.core.models.gpt import gpt_layer_specs

    config = config_of(None, mtp_num_layers=1)
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    made = [gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, False, pp_rank=rank) for rank in (0, 1)]
    assert made[0] is None and len(made[1].layer_specs) == 1


def test_every_name_of_the_functions(on, one_rank):
    """Other modules have taken them before."""
    from megatron.core.models.gpt import gpt_layer_specs

    config = config_of()
    assert gpt_layer_specs.get_transformer_layer_offset(config, pp_rank=1) == 1
    assert transformer_block.get_transformer_layer_offset(pp_rank=1, config=config) == 1
    assert gpt_layer_specs.get_num_layers_to_build(config, None, 1) == 3


def test_the_config_stays_as_it_is(on, one_rank):
    config = config_of()
    layout, fields = config.pipeline_model_parallel_layout, dict(vars(config))
    of_layout = dict(vars(layout))
    assert [said(config, rank) for rank in (0, 1, None)] == [(0, 1), (1, 3), (0, 1)]
    assert vars(config) == fields and config.pipeline_model_parallel_layout is layout and vars(layout) == of_layout


def test_calls_that_stock_answers_right_are_handed_on_as_they_are(one_rank):
    """Without a layout, and without a rank."""
    without, given = config_of(None), config_of()
    stock = [said(without, rank) for rank in (0, 1, None)]
    with shim.patched(only=[ID], require=[ID]), mock.patch("copy.copy", side_effect=AssertionError):
        assert [said(without, rank) for rank in (0, 1, None)] == stock
        assert said(given, None) == (0, 1)


def test_without_parallel_state(on):
    """A rank that is given is all that is needed. Stock asks parallel_state."""
    assert not parallel_state.model_parallel_is_initialized()
    assert said(config_of(), 1) == (1, 3)


def built_on_rank():
    with (
        testing.megatron_on_cpu(),
        testing.layout_initialised(Layout(ep=2)),
        shim.patched(only=[ID], require=[ID]),
    ):
        return built_layers()


def test_a_model_with_a_pipeline_group_of_its_own(ranks2):
    assert ranks2.run(built_on_rank) == NUMBERS
