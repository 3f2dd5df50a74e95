"""expert-main-params: each optimizer of a chain reloads the state of its own chunks, and all else is stock's."""

import contextlib

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import MODEL, Training, fused_adam
from shim.patches.megatron_core.expert_main_params.proof import EXPERTS, more_precise, wrong_main_params
from shim.testing import Layout

CELLS = {"0.15.3": "all"}

ID = "expert-main-params"
pytestmark = needed(ID)


@contextlib.contextmanager
def patched(on=True):
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(ep=2)), fused_adam():
        with shim.patched(only=[ID], require=[ID]) if on else contextlib.nullcontext():
            yield


def training():
    return Training(None, saved=False, bf16=True, **EXPERTS)


def mains(made):
    """The main parameters of all optimizers of this rank."""
    return [
        main.clone()
        for optimizer in made.optimizer.chained_optimizers
        for group in optimizer.shard_fp32_from_float16_groups
        for main in group
    ]


def reloaded(given):
    """On this rank: (wrong main parameters, all) after a reload from a state dict in one of its forms."""
    with patched():
        made = training()
        state = more_precise(made)
        made.optimizer.reload_model_params(state_dict={"model": state} if given == "model" else state)
        return wrong_main_params(made, state)


@pytest.mark.parametrize("given", ["model", "names"])
def test_all_main_parameters_are_those_of_the_state_dict(ranks2, given):
    for wrong, count in ranks2.run(reloaded, given):
        assert wrong == 0 and count > 10


def without_a_state_dict(on):
    with patched(on):
        made = training()
        for weight in made.model.parameters():
            weight.data += 1
        made.optimizer.reload_model_params()
        return mains(made)


def test_without_a_state_dict_the_model_is_reloaded_as_on_stock(ranks2):
    for found, stock in zip(ranks2.run(without_a_state_dict, True), ranks2.run(without_a_state_dict, False)):
        assert found and all(map(torch.equal, found, stock))


def two_chunks(prefix, lost=None):
    """On this rank, the numbers of the state dicts' chunks that each optimizer gets, or the error."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with patched():
        dtypes = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        chunks = []
        for seed in (7, 8):
            model = testing.build_gpt(**{**MODEL, **dtypes, **EXPERTS, "seed": seed}).bfloat16()
            chunks.append(DistributedDataParallel(model.config, config, model))
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "type", testing.cpu.type_on_a_gpu)
            chained = get_megatron_optimizer(settings, chunks)
        if prefix is None:
            return chained._split_state_dict(None)
        state = {f"{prefix}{number}": number for number in (0, 1)}
        state.pop(lost, None)
        try:
            return chained._split_state_dict(state)
        except KeyError as error:
            return error.args[0]


@pytest.mark.parametrize("prefix", ["model", "model_"])
def test_each_optimizer_gets_all_of_its_chunks(ranks2, prefix):
    """Both optimizers have parameters of both chunks. Stock counts four chunks, and raises."""
    whole = {f"{prefix}0": 0, f"{prefix}1": 1}
    assert ranks2.run(two_chunks, prefix) == [[whole, whole]] * 2


def test_without_a_state_dict_no_optimizer_gets_one(ranks2):
    assert ranks2.run(two_chunks, None) == [[None, None]] * 2


def test_a_chunk_that_the_state_dict_lacks_is_named(ranks2):
    for said in ranks2.run(two_chunks, "model", "model1"):
        assert said == "the state dict has no model1, and the model has 2 chunks"
