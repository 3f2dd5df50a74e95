"""Proofs of fused-adam-step.

FusedAdam is Transformer Engine's. Of its compiled part, shim.testing.multi_tensor stands in.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn

from shim import testing
from shim.testing import sharded
from shim.testing.cpu import type_on_a_gpu
from shim.testing.layout import Layout
from shim.testing.proof import CannotRunError, Here, proof

NORM, ROWS = 10, 30
STEPS = 20


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Inside, megatron-core's Adam is Transformer Engine's, and its checkpoints can be saved here."""
    with (
        testing.te_cuda_stand_ins(),
        testing.multi_tensor_ops(),
        # The sharding of releases up to 0.15 is written for numpy 1.
        mock.patch.object(numpy, "product", numpy.prod, create=True),
    ):
        yield


def layer(config: Any) -> nn.Module:
    """A norm's weight and a matrix. The buffer of gradients begins with the last: the norm is in its second half."""
    from megatron.core.transformer.module import MegatronModule

    class ScaledLinear(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            generator = torch.Generator().manual_seed(1)
            self.norm = nn.Parameter(torch.ones(NORM))
            self.matrix = nn.Parameter(torch.randn(ROWS, NORM, generator=generator))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs * self.norm) @ self.matrix.T

    return ScaledLinear()


class Training:
    """ScaledLinear, trained by the distributed optimizer. All ranks have the same data."""

    def __init__(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.model: Any = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), layer(config)
        )
        options = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True)
        with mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
            self.optimizer = get_megatron_optimizer(options, [self.model])
        self.steps, self.loading = 0, False

    def train(self, steps: int) -> Training:
        """Take steps. The data of a step depend on its number alone."""
        for _ in range(steps):
            inputs = torch.randn(5, NORM, generator=torch.Generator().manual_seed(self.steps))
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(inputs).sin().sum().backward()
            self.model.finish_grad_sync()
            assert self.optimizer.step()[0]
            self.steps += 1
        return self

    def counts(self) -> list[int | None]:
        """The step of each group that this rank would save."""
        saved = self.optimizer.state_dict()
        return [group.get("step") for group in saved["optimizer"]["param_groups"]]

    def empty_groups(self) -> int:
        """How many groups have no parameter on this rank."""
        (inner,) = [each.optimizer for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]
        return sum(not group["params"] for group in inner.param_groups)

    def weights(self) -> Tensor:
        """All weights, in one row."""
        return torch.cat([weight.detach().flatten() for weight in self.model.module.parameters()])

    def sharded_state_dict(self) -> dict[str, Any]:
        """What is saved, or what shall be loaded."""
        model = self.model.module.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=self.loading)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded."""
        self.model.module.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])

    def resumed(self, directory: str) -> Training:
        """Go on from a checkpoint."""
        self.loading, self.steps = True, STEPS
        sharded.load(self, directory)
        self.loading = False
        return self


def updates(training: Training) -> Tensor:
    """What a further step adds to the weights."""
    before = training.weights()
    return training.train(1).weights() - before


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


def save(directory: str) -> Tensor:
    """Train and save; the next updates of the training that goes on."""
    training = Training().train(STEPS)
    sharded.save(training, directory)
    return updates(training)


def counts_in_empty_groups() -> bool:
    """Whether FusedAdam counts the steps of a group without parameters."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = FusedAdam([{"params": []}, {"params": [weight]}])
    optimizer.step()
    return "step" in optimizer.param_groups[0]


def after_resume(directory: str) -> float:
    with fused_adam():
        if counts_in_empty_groups():
            raise CannotRunError("FusedAdam of this Transformer Engine counts in empty groups, and saves their step")
        right = save(directory)
        return apart(updates(Training().resumed(directory)), right)


def damaged(training: Training) -> dict[str, Any]:
    """The state that 0.12 and 0.13 save if a group is empty on rank 0: one of the groups has no step."""
    state: dict[str, Any] = training.optimizer.state_dict()
    del state["optimizer"]["param_groups"][-1]["step"]
    return state


def after_damage(count: bool) -> float:
    """How far the step after loading such a state is off; with `count`, the counts that differ after it."""
    with fused_adam():
        training = Training().train(STEPS)
        training.optimizer.load_state_dict(damaged(training))
        update = updates(training)
        counts = set(training.counts()) if count else set()
        return len(counts) - 1 if count else apart(update, updates(Training().train(STEPS)))


@proof(
    "first updates after a resume off by {:.0%}",
    bound=1e-6,
    ranks=2,
    te=True,
    beside=("checkpoint-write-format",),
    variants=["v0_12"],
)
def adam_counts_on_after_a_resume(here: Here) -> float:
    """After a resume Adam begins with step 1 for weights that the data-parallel rank 0 has none of.

    To reproduce, on two data-parallel ranks: give the distributed optimizer, with Transformer Engine's FusedAdam, a
    module with a norm of 10 elements and a matrix of 300. The norm is in a group without weight decay, which is empty
    on rank 0. Train 20 steps, save `optimizer.sharded_state_dict(...)` by dist_checkpointing, load it, and compare the
    next step with that of the training that goes on.

    FusedAdam counts no step of a group without parameters (issue 1986), and data-parallel rank 0 writes the groups. The
    norm is then updated with the bias correction of step 1. Right is that of step 21. Megatron-core 0.14 writes one
    step for all groups, and Transformer Engine counts in all from 2.19 on (pull request 3318).
    """
    with tempfile.TemporaryDirectory() as directory:
        return max(here.run(after_resume, directory, layout=Layout(ep=2)))


@proof("first update after a resume off by {:.0%}", bound=1e-6, te=True)
def a_checkpoint_without_a_step(here: Here) -> float:
    """A checkpoint in which a group has no step goes on with step 1 for its weights.

    To reproduce: train 20 steps with the distributed optimizer and Transformer Engine's FusedAdam, delete "step" from
    one of the groups of `optimizer.state_dict()`, as 0.12 and 0.13 write it, and load the state. The next step should
    be that of the training that goes on, and is that of step 1 for this group.
    """
    return float(here.run(after_damage, False)[0])


@proof(
    "{:.0f} other step is saved",
    right="one step for all groups",
    defect="crash",
    crashes=r"^AssertionError: steps: \[",
    te=True,
)
def a_checkpoint_without_a_step_is_saved_again(here: Here) -> float:
    """After a resume from a checkpoint in which a group has no step, the next checkpoint cannot be saved.

    To reproduce: load such a state (see the proof above), take a step, and call `optimizer.state_dict()`. From 0.14 on
    it raises "AssertionError: steps: [1, 21]", hours after the resume. Before, it saves both.
    """
    return float(here.run(after_damage, True)[0])
