"""resumed-learning-rate: Megatron-FSDP, whose checkpoints have the settings of a group beside the name of each weight.

Megatron-FSDP itself needs a GPU. Here the optimizer is told of it, so that it saves and loads as it does then.
"""

import copy

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import shim
from shim import testing
from shim.patches.megatron_core.resumed_learning_rate.proof import SAVED, WANTED, scheduler_of
from shim.testing.cpu import optimizer_on_cpu

CELLS = {"0.19.2": "all"}

ID = "resumed-learning-rate"
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(
        not hasattr(DistributedOptimizer, "sharded_param_state_fsdp_dtensor"),
        reason="Megatron-FSDP of this release has no such checkpoints",
    ),
]


def optimizer_of(rate, several):
    """With states. Embeddings and the output have half of the rate, if `several`."""
    model = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    ddp.use_megatron_fsdp = True
    rates = {"decoupled_lr": rate / 2, "decoupled_min_lr": rate / 20} if several else {}
    config = OptimizerConfig(
        optimizer="adam", lr=rate, min_lr=rate / 10, clip_grad=0.0, use_distributed_optimizer=True, **rates
    )
    optimizer = optimizer_on_cpu(config, [wrapped])
    (optimizer,) = getattr(optimizer, "chained_optimizers", [optimizer])
    row = torch.arange(8)[None]
    model(row, row, None, labels=row).mean().backward()
    optimizer.optimizer.step()
    return optimizer


def rates(optimizer):
    return [(group["lr"], group["weight_decay"] / (group["wd_mult"] or 1)) for group in optimizer.param_groups]


def resumed(several, **asked):
    """The rates that the run that saved has, that this run begins with, and that it goes on with."""
    trained = optimizer_of(SAVED, several)
    before = scheduler_of(trained, SAVED, start_wd=0.1, end_wd=0.1)
    before.step(5)
    optimizer = optimizer_of(WANTED, several)
    scheduler = scheduler_of(optimizer, WANTED, **asked)
    own = rates(optimizer)
    optimizer.load_state_dict(copy.deepcopy(trained.sharded_param_state_fsdp_dtensor()))
    scheduler.load_state_dict(before.state_dict())
    return rates(trained), own, rates(optimizer)


@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("asked", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"])
def test_the_rates_that_are_asked_for(several, asked):
    *_, stock = resumed(several, **{asked: True})
    with shim.patched(only=[ID], require=[ID]):
        saved, own, found = resumed(several, **{asked: True})
    assert found == (own if asked.startswith("override") else saved) != stock
