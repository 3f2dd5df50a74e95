"""Proofs of dp-reshardable-fp32."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from shim.patches.megatron_core._proof_optimizer_resume import (
    BY_DATA,
    STEPS,
    Training,
    apart,
    fused_adam,
    save_after,
    weights_after,
    weights_resumed,
)
from shim.testing.layout import Layout
from shim.testing.proof import Here, proof


def resumed_apart(here: Here, settings: dict[str, Any]) -> float:
    """How far weights are from those of a training without a break: saved on all ranks, resumed on one."""
    with tempfile.TemporaryDirectory() as directory:
        here.run(save_after, STEPS, directory, BY_DATA, settings, layout=Layout(ep=here.world))
        resumed = here.run(weights_resumed, STEPS, directory, BY_DATA, settings)[0]
    return apart(resumed, here.run(weights_after, 2 * STEPS, BY_DATA, settings)[0])


@proof(
    "weights off by {:.1e} three steps after a resume",
    right="bit-equal",
    defect="crash",
    crashes=r"^ModelError: loading, RuntimeError: a view of a leaf Variable that requires grad is being used in",
    ranks=2,
)
def a_training_with_norms_in_fp32_resumes(here: Here) -> float:
    """A dp_reshardable checkpoint with a weight in fp32 cannot be loaded.

    To reproduce: train low-rank adapters of a GPTModel in bf16 whose norms are also trained, and are in fp32, with
    DistributedDataParallel and get_megatron_optimizer, `use_distributed_optimizer=True`. Save
    `optimizer.sharded_state_dict(model.sharded_state_dict(), metadata={"distrib_optim_sharding_type":
    "dp_reshardable"})` by dist_checkpointing.save, and load it. On a CPU, `Tensor.type()` has to answer as on a GPU,
    and Adam has to keep the number of steps in its groups, as in Apex.

    load_parameter_state_from_dp_reshardable copies into the main weights. Those of fp32 weights are views of them, so a
    RuntimeError says that a leaf which requires a gradient is changed in place. The functions that load other formats
    have torch.no_grad(). A training that was saved after three steps on two ranks, and goes on for three more on one,
    should have the weights of six steps without a break.
    """
    return resumed_apart(here, {"seed": 7, "bf16": True, "mixed": True, "lora": True, "norms": True, "bucket": None})


def resumed_from_a_file(**settings: Any) -> float:
    """How far weights are from those of a training without a break: resumed from the file of `load_parameter_state`."""
    settings = {"metadata": None, "saved": False, **settings}
    with fused_adam(), tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/states.pt"
        training = Training(**settings).train()
        training.optimizer.save_parameter_state(file)
        groups, weights = training.optimizer.state_dict(), training.weights()
        resumed = Training(**settings, seed=8)
        with torch.no_grad():
            for weight, value in zip(resumed.model.parameters(), weights, strict=True):
                weight.copy_(value)
        resumed.optimizer.load_state_dict(groups)
        resumed.optimizer.load_parameter_state(file)
        return apart(resumed.train().weights(), training.train().weights())


@proof(
    "weights off by {:.1e} three steps after a resume",
    right="bit-equal",
    defect="crash",
    crashes=r"^RuntimeError: a view of a leaf Variable that requires grad is being used in",
)
def a_training_in_fp32_resumes_from_the_file_of_all_ranks(here: Here) -> float:
    """The optimizer's file beside a checkpoint of `--ckpt-format torch` cannot be loaded if a weight is in fp32.

    To reproduce: train a GPTModel in fp32 with DistributedDataParallel and get_megatron_optimizer,
    `use_distributed_optimizer=True`, call `optimizer.save_parameter_state(file)`, and in a new training
    `load_state_dict` and `load_parameter_state(file)`. On a CPU as above.

    load_parameter_state_from_dp_zero copies into the main weights, too, from 0.12 to 0.20.
    """
    return float(here.run(resumed_from_a_file)[0])
