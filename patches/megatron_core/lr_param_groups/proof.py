"""Proof of lr-param-groups."""

from __future__ import annotations

import copy

from shim.patches.megatron_core._proof_param_groups import fields, optimizer_of
from shim.testing.proof import Here, proof


def wrong_groups(distributed: bool) -> int:
    """Groups that have other settings after the state of an equal optimizer was loaded."""
    trained, resumed = optimizer_of(distributed), optimizer_of(distributed)
    expected = fields(trained)
    resumed.load_state_dict(copy.deepcopy(trained.state_dict()))
    found = fields(resumed)
    assert len(found) == len(expected)
    return sum(one != other for one, other in zip(found, expected, strict=True))


@proof("{:.0f} of 3 groups with other learning rates", right="all groups as they were saved")
def the_distributed_optimizer_resumes_with_its_learning_rates(here: Here) -> int:
    """The distributed optimizer loads the learning rates of another parameter group.

    To reproduce: wrap a GPTModel in DistributedDataParallel, and make two optimizers by get_megatron_optimizer with
    `OptimizerConfig(lr=1e-3, decoupled_lr=5e-4, use_distributed_optimizer=True)`. Train one step, load `state_dict()`
    of the first into the second, and compare max_lr and min_lr of each of `optimizer.param_groups`. On a CPU,
    `Tensor.type()` has to answer as on a GPU.

    Groups are matched by wd_mult, lr_mult, is_expert_parallel and is_decoupled_lr. Since 0.16 overrides make groups
    that differ in none of these, and the last one of the checkpoint stands for all of them. So decoupled_lr, or any
    override of max_lr, trains layers with the learning rate of others after a resume. Each group should have its own.
    Fixed in 0.19 by Megatron-LM pull request 4705.
    """
    return here.run(wrong_groups, True)[0]


@proof(
    "{:.0f} of 3 groups with other learning rates",
    right="all groups as they were saved",
    defect="crash",
    crashes=r"^ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's",
)
def an_optimizer_resumes_with_its_learning_rates(here: Here) -> int:
    """An optimizer whose parameter groups differ only in their learning rate cannot be loaded.

    To reproduce: wrap a GPTModel in DistributedDataParallel, and make two optimizers by get_megatron_optimizer with
    `OptimizerConfig(lr=1e-3, decoupled_lr=5e-4)`. Train one step, and load `state_dict()` of the first into the second.

    `_filter_and_reorder_param_groups` matches groups by wd_mult, lr_mult, is_expert_parallel and is_decoupled_lr, in
    which the groups of decoupled_lr and all others are the same since 0.16. It returns the last one twice, and torch
    raises a ValueError. Each group should be found. Fixed in 0.19 by Megatron-LM pull request 4705.
    """
    return here.run(wrong_groups, False)[0]
