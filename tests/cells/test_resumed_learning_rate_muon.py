"""resumed-learning-rate: Muon and the Adam beside it, in a chain and by layers, resume at the rates of their choice."""

import contextlib
import copy
import tempfile
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as upstream
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.moe import moe_utils
from thorough import times

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import fused_adam
from shim.patches.megatron_core.muon_qkv_shapes.proof import muon
from shim.patches.megatron_core.resumed_learning_rate.proof import SAVED, WANTED, scheduler_of
from shim.testing import sharded
from shim.testing.cpu import type_on_a_gpu

CELLS = {"0.19.2": "all"}

ID = "resumed-learning-rate"
# What a checkpoint of several rates needs on 0.16 to 0.18.
BOTH = [ID, *(["lr-param-groups"] if shim.plan()["lr-param-groups"].wanted else [])]
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}
OLD_DECAY, NEW_DECAY = 0.1, 0.01
BY_LAYER = "megatron.core.optimizer.layer_wise_optimizer"
HAS_MUON = find_spec(BY_LAYER) is not None
# From 0.18 on Adam beside a Muon by layers can be a distributed optimizer.
HAS_SPLIT = HAS_MUON and hasattr(import_module(BY_LAYER), "tag_params_for_buffer_routing")
FORMS = ["chain", "by layers", *(["by layers beside a distributed one"] if HAS_SPLIT else [])]
# From 0.18 on Muon by layers has no step in fp32 ("no attribute 'prepare_grads'").

pytestmark = pytest.mark.skipif(not HAS_MUON, reason="this release has no Muon")


class Run:
    """A model with Muon, which has taken no step. Embeddings and the output have half of the rate, if `several`."""

    def __init__(self, form, rate, several, seed):
        by_layers, split = form != "chain", "distributed" in form
        experts = {} if split else {"num_moe_experts": 2}  # which the two together refuse
        self.model = testing.build_gpt(mtp_num_layers=None, seed=seed, **experts, **BF16).bfloat16()
        rates = {"decoupled_lr": rate / 2, "decoupled_min_lr": rate / 20} if several else {}
        rates |= {"lr": rate, "min_lr": rate / 10}
        new = hasattr(upstream, "_get_megatron_emerging_optimizer")
        wise = {"use_layer_wise_distributed_optimizer": by_layers} if new else {}
        config = OptimizerConfig(optimizer="muon", clip_grad=0.0, **rates, **wise, **BF16)
        overrides = {"config_overrides": upstream.get_standard_config_overrides(config)} if several else {}
        self.wrapped = self._wrapped(split)
        with mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
            if new:
                self.optimizer = upstream.get_megatron_optimizer(config, [self.wrapped], **overrides)
            else:
                self.optimizer = import_module("megatron.core.optimizer.muon").get_megatron_muon_optimizer(
                    config, [self.wrapped], use_gloo_process_groups=False,
                    layer_wise_distributed_optimizer=by_layers, **overrides,
                )  # fmt: skip
        self.loading = False

    def _wrapped(self, split):
        config = DistributedDataParallelConfig(use_distributed_optimizer=split)
        if not split:
            return DistributedDataParallel(self.model.config, config, self.model)
        module = import_module(BY_LAYER)
        module.tag_params_for_buffer_routing([self.model])
        layout = module.LayerWiseDistributedOptimizer.compute_full_param_layout
        size = dist.get_world_size()
        made = layout(list(self.model.parameters()), None, size, config, expert_data_parallel_world_size=size)
        return DistributedDataParallel(self.model.config, config, self.model, full_param_layout=made)

    def rates(self):
        """What each group has for its next step."""
        return [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]

    def step(self):
        row = torch.arange(8)[None]
        with (
            mock.patch.object(torch.Tensor, "type", type_on_a_gpu),
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),  # a name of Transformer Engine
        ):
            self.wrapped.zero_grad_buffer()
            self.wrapped(row, row, None, labels=row).float().mean().backward()
            self.wrapped.finish_grad_sync()
            assert self.optimizer.step()[0]

    def sharded_state_dict(self):
        model = self.model.sharded_state_dict()
        given = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=self.loading, **given)}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])


def resumed(form, several, file, **asked):
    """The rates and decays that the run that saved has, that this run begins with, and that it goes on with."""
    adam = fused_adam() if "distributed" in form else contextlib.nullcontext()
    with testing.layout_initialised(testing.Layout()), muon(), adam:
        trained = Run(form, SAVED, several, seed=7)
        before = scheduler_of(trained.optimizer, SAVED, start_wd=OLD_DECAY, end_wd=OLD_DECAY)
        trained.step()
        before.step(5)
        run = Run(form, WANTED, several, seed=8)
        scheduler = scheduler_of(run.optimizer, WANTED, start_wd=NEW_DECAY, end_wd=NEW_DECAY, **asked)
        own = run.rates()
        if file:
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder)
            sharded.save(trained, folder[0])
            run.loading = True
            sharded.load(run, folder[0])
        else:
            run.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
        scheduler.load_state_dict(before.state_dict())
        found = run.rates()
        run.step()
        return trained.rates(), own, found


def on_both_sides(*args, **asked):
    try:
        stock = resumed(*args, **asked)
    except (ValueError, KeyError, sharded.ModelError) as error:
        stock = repr(error)
    with shim.patched(only=BOTH, require=[ID]):
        return stock, resumed(*args, **asked)


def judged(stock, found, overrides):
    saved, own, rates = found
    assert rates == (own if overrides else saved)
    assert len({rate for rate, _ in own} & {rate for rate, _ in saved}) == 0
    if isinstance(stock, str):
        assert "Could not find parameter group" in stock or "KeyError" in stock
    else:
        assert stock[2] != rates and stock[:2] == found[:2]


ask = pytest.mark.parametrize("asked", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"])


@ask
@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
def test_a_chain_of_muon_and_adam(asked, several):
    judged(*on_both_sides("chain", several, False, **{asked: True}), asked.startswith("override"))


@ask
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("several", times([True], [True, False]), ids=str)
def test_a_file_on_two_ranks(ranks2, form, asked, several):
    """By layers a rank has groups without a weight."""
    for stock, found in ranks2.run(_on_two, form, several, asked):
        judged(stock, found, asked.startswith("override"))


def _on_two(form, several, asked):
    return on_both_sides(form, several, True, **{asked: True})
