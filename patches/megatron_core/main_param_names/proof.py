"""Proof of main-param-names."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.testing.cpu import optimizer_on_cpu
from shim.testing.proof import Here, LacksFeatureError, proof


class Experts(nn.Module):
    """Weights with the names of those of TEGroupedMLP, whose linear layers need Transformer Engine."""

    def __init__(self, count: int, size: int = 4) -> None:
        super().__init__()
        for layer in ("linear_fc1", "linear_fc2"):
            weights = nn.Module()
            for number in range(count):
                weights.register_parameter(f"weight{number}", nn.Parameter(torch.empty(size, size)))
            setattr(self, layer, weights)


def wrapped_model(experts: int, lora: bool = False) -> Any:
    """A GPTModel in bf16 with so many experts in its layer, in DistributedDataParallel.

    The embedding is frozen, or with lora all but the adapters.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    weights = Experts(experts).requires_grad_(not lora)
    model.embedding.requires_grad_(False)
    if lora:
        testing.add_lora(model)
    model.decoder.layers[0].mlp.experts = weights
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    return DistributedDataParallel(model.config, ddp, model.bfloat16())


def optimizer_of(wrapped: Any) -> Any:
    """The distributed optimizer of the model, with main parameters in fp32."""
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    return optimizer_on_cpu(config, [wrapped])


def checkpoint_of(wrapped: Any) -> dict[str, Tensor]:
    """Weights in fp32 that bf16 would round."""
    generator = torch.Generator().manual_seed(0)
    return {
        name.removeprefix("module."): torch.randn(weight.shape, generator=generator)
        for name, weight in wrapped.named_parameters()
    }


def main_params_of(wrapped: Any) -> dict[str, Tensor]:
    """The main parameters of all weights that are trained, by the names of a checkpoint."""
    return {
        name.removeprefix("module."): weight.main_param
        for name, weight in wrapped.named_parameters()
        if weight.requires_grad
    }


def wrong_main_params(experts: int) -> int:
    """Main parameters that are not those of the checkpoint after reload_model_params."""
    wrapped = wrapped_model(experts)
    optimizer = optimizer_of(wrapped)
    if "state_dict" not in inspect.signature(optimizer.reload_model_params).parameters:
        raise LacksFeatureError("optimizers of this release take no main parameters from a checkpoint")
    state = checkpoint_of(wrapped)
    optimizer.reload_model_params(state_dict=state)
    return sum(not torch.equal(found, state[name].flatten()) for name, found in main_params_of(wrapped).items())


@proof(
    "{:.0f} main parameters not those of the checkpoint",
    right="all main parameters are those of the checkpoint",
    defect="crash",
    crashes=r"^AssertionError: Parameter .*\.experts\.linear_fc1\.weight1 has 3 matches in state dict",
)
def numbered_weights_find_their_main_parameters(here: Here) -> int:
    """Main parameters cannot be loaded from a checkpoint if a rank has more than ten experts.

    To reproduce: train a mixture of experts in bf16 with TEGroupedMLP, 12 experts per rank, and the distributed
    optimizer. Call `optimizer.reload_model_params(state_dict)` with the fp32 weights of the model, as
    `--load-main-params-from-ckpt` does. `_build_model_param_to_state_dict_param_map` raises "AssertionError: Parameter
    decoder.layers.0.mlp.experts.linear_fc1.weight1 has 3 matches in state dict".

    It looks for the name anywhere in the keys, and finds that of weight1 in those of weight1, weight10 and weight11.
    The key of a parameter should end with its name. No expert has to run for this, so parameters with such names are
    enough, and no GPU is needed, if `Tensor.type()` answers as on a GPU.

    Fixed in 0.17 by Megatron-LM pull request 3569.
    """
    return here.run(wrong_main_params, 12)[0]
