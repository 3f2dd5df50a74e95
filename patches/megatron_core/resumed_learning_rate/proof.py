"""Proofs of resumed-learning-rate."""

from __future__ import annotations

import copy
from typing import Any

from shim.patches.megatron_core._proof_param_groups import optimizer_of
from shim.testing.proof import Here, proof

SAVED, WANTED = 1e-3, 1e-5  # learning rates of the run that saves and of the one that resumes


def scheduler_of(optimizer: Any, rate: float, **settings: Any) -> Any:
    """A scheduler of a constant learning rate."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        **{
            "init_lr": 0.0,
            "max_lr": rate,
            "min_lr": rate / 10,
            "lr_warmup_steps": 0,
            "lr_decay_steps": 100,
            "lr_decay_style": "constant",
            "start_wd": 0.01,
            "end_wd": 0.01,
            "wd_incr_steps": 100,
            "wd_incr_style": "constant",
            "use_checkpoint_opt_param_scheduler": False,
            **settings,
        },
    )


def resumed(distributed: bool, rate: float = WANTED, **settings: Any) -> Any:
    """An optimizer that has loaded the checkpoint of one with another learning rate and weight decay."""
    one_rate = {"decoupled_lr": None, "decoupled_min_lr": None}
    trained = optimizer_of(distributed, lr=SAVED, min_lr=SAVED / 10, **one_rate)
    before = scheduler_of(trained, SAVED, start_wd=0.1, end_wd=0.1)
    before.step(5)
    optimizer = optimizer_of(distributed, lr=rate, min_lr=rate / 10, **one_rate)
    scheduler = scheduler_of(optimizer, rate, **settings)
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    scheduler.load_state_dict(before.state_dict())
    return optimizer


def times_the_wanted_rate(distributed: bool) -> float:
    """By how much the learning rate of the next step is larger than the one of the run."""
    groups = resumed(distributed, override_opt_param_scheduler=True).param_groups
    return max(float(group["lr"]) for group in groups) / WANTED


NOT_FOUND = r"^(ValueError: Could not find parameter group|KeyError: \()"


@proof("learning rate {:.0f} times the run's", bound=1 + 1e-9, crashes=NOT_FOUND)
def a_resume_overrides_the_learning_rate(here: Here) -> float:
    """A distributed optimizer goes on with the learning rate of the checkpoint, whatever the run asks for.

    To reproduce: wrap a GPTModel in DistributedDataParallel, and make two optimizers by get_megatron_optimizer with
    `OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)` and with `lr=1e-5`, and for each an
    OptimizerParamScheduler of the same rate, the second one with `override_opt_param_scheduler=True`. Train a step,
    load the states of the first optimizer and scheduler into the second ones, and look at "lr" of
    `optimizer.param_groups`. On a CPU, `Tensor.type()` has to answer as on a GPU.

    The groups of the checkpoint bring their max_lr and min_lr, which the scheduler prefers to its own. Right is the
    rate of the second run. From 0.12 to 0.18; 0.19 looks for a group with the rate of the run, and raises.
    """
    found: float = here.run(times_the_wanted_rate, True)[0]
    return found


@proof("learning rate {:.0f} times the run's", bound=1 + 1e-9, crashes=NOT_FOUND)
def an_optimizer_on_all_ranks_overrides_it(here: Here) -> float:
    """An optimizer that is not distributed goes on with the learning rate of the checkpoint.

    To reproduce: as above, without `use_distributed_optimizer`. From 0.12 to 0.18; 0.19 raises "Could not find
    parameter group with key".
    """
    found: float = here.run(times_the_wanted_rate, False)[0]
    return found


def weight_decay_off() -> float:
    """How far the weight decay of the next step is from that of the checkpoint."""
    groups = resumed(True, rate=SAVED, use_checkpoint_opt_param_scheduler=True).param_groups
    return max(abs(group["weight_decay"] - 0.1 * group["wd_mult"]) for group in groups)


@proof("weight decay off by {:.2f}", right="the weight decay of the checkpoint")
def the_first_step_decays_as_the_checkpoint_does(here: Here) -> float:
    """The first step after a resume has the weight decay of the run, though it asked for that of the checkpoint.

    To reproduce: as above, but with the same learning rate, `use_checkpoint_opt_param_scheduler=True` and schedulers
    with `start_wd=end_wd=0.1` and with 0.01. Look at "weight_decay" of the groups after loading.

    `OptimizerParamScheduler.load_state_dict` calls `step` before it takes start_wd and end_wd from the checkpoint.
    Right is 0.1 from the first step on. From 0.12 to 0.19.
    """
    found: float = here.run(weight_decay_off)[0]
    return found
