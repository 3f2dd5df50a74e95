"""Proof of expert-main-params."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_optimizer_resume import Training, fused_adam
from shim.testing.layout import Layout
from shim.testing.proof import CannotRunError, Here, LacksFeatureError, proof

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "allgather",
}


def more_precise(training: Training) -> dict[str, Tensor]:
    """The weights of a model as a checkpoint in fp32 has them: name -> values that bf16 rounds."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight.detach().float() + 1e-3 * torch.rand(weight.shape, generator=generator)
        for name, weight in training.model.named_parameters()
    }


def wrong_main_params(training: Training, state: dict[str, Tensor]) -> tuple[int, int]:
    """(main parameters of this rank that are not those of the state, all)."""
    names = {id(weight): name for name, weight in training.model.named_parameters()}
    wrong = count = 0
    for optimizer in training.optimizer.chained_optimizers:
        groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        for weight, main in ((weight, main) for group in groups for weight, main in zip(*group, strict=True)):
            own = optimizer._get_model_param_range_map(weight)["param"]
            right = state[names[id(weight)]].view(-1)[own.start : own.end]
            wrong, count = wrong + (not torch.equal(main, right)), count + 1
    return wrong, count


def reloaded() -> int:
    with fused_adam():
        training = Training(None, saved=False, bf16=True, **EXPERTS)
    if len(training.optimizer.chained_optimizers) < 2:
        raise CannotRunError("experts have no optimizer of their own here")
    state = more_precise(training)
    try:
        training.optimizer.reload_model_params(state_dict={"model": state})
    except TypeError as error:
        raise LacksFeatureError("this release reloads from the model only") from error
    return wrong_main_params(training, state)[0]


@proof("{:.0f} main parameters of experts are rounded", right="all are those of the state dict", ranks=2)
def main_parameters_of_experts_are_those_of_the_state_dict(here: Here) -> int:
    """Main parameters of experts are rounded to bf16 although a state dict in fp32 is given.

    To reproduce: on two expert-parallel ranks wrap a GPTModel in bf16 with experts in DistributedDataParallel, and make
    its optimizer by get_megatron_optimizer with `use_distributed_optimizer=True`. Call
    `optimizer.reload_model_params(state_dict={"model": state})` with weights in fp32, and compare the main parameters.

    `ChainedOptimizer._split_state_dict` gives the state dict to the first optimizer only, which has all weights but
    those of experts. The second takes the weights of the model, in bf16. Right are the values of the state dict in
    both, which are as precise as the checkpoint.

    In 0.14 to 0.17. Before, reload_model_params takes no state dict.
    """
    return sum(here.run(reloaded, layout=Layout(ep=here.world)))
