"""Proofs of expert-grad-groups."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 4,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
}
STEPS, ROWS, TOKENS, LR = 3, 2, 16, 0.5


def wrapped_model(distributed: bool = False, **options: Any) -> Any:
    """A GPTModel with experts of this layout, in DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    cut = parallel_state.get_tensor_model_parallel_world_size() > 1
    model = testing.build_gpt(**{**MODEL, "sequence_parallel": cut, **options})
    return DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )


def step(wrapped: Any, number: int = 0) -> None:
    """Forward, backward and the sum over ranks, for the rows of this data-parallel rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.moe import moe_utils

    rows = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
    rows = rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    places = torch.arange(TOKENS).expand_as(rows)
    wrapped.zero_grad_buffer()
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        wrapped(rows, places, None, labels=rows.roll(-1, 1)).mean().backward()
    finalize_model_grads([wrapped])


def weights_of_experts(wrapped: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in wrapped.named_parameters() if ".experts." in name}


def training(**options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The weights of this rank's experts before and after some steps of SGD, and its expert tensor-parallel rank."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with torch.compiler.set_stance("force_eager"):  # a part of the router is compiled on first use, for many seconds
        wrapped = wrapped_model(**options)
        before = weights_of_experts(wrapped)
        sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=LR, **sgd), [wrapped])
        for number in range(STEPS):
            step(wrapped, number)
            optimizer.step()
    return before, weights_of_experts(wrapped), parallel_state.get_expert_tensor_parallel_rank()


def mine(whole: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """The part of a weight that has this shape."""
    for dim in (dim for dim in range(whole.dim()) if whole.shape[dim] != shape[dim]):
        return whole.split(shape[dim], dim)[rank]
    return whole


def error(here: Here, layout: Layout) -> float:
    """How far the weights of experts are from where one rank alone gets, over the way there; on the worst rank."""
    before, truth, _ = here.run(training)[0]
    way = torch.cat([(truth[name] - before[name]).flatten() for name in truth]).norm()
    worst = 0.0
    for _, found, rank in here.run(training, layout=layout, timeout=60):
        off = [(weight - mine(truth[name], weight.shape, rank)).flatten() for name, weight in found.items()]
        worst = max(worst, float(torch.cat(off).norm() / way))
    return worst


@proof("weights of experts off by {:.1e}", bound=1e-5, ranks=2, crashes=r"^RuntimeError: split_with_sizes expects")
def experts_that_several_tensor_parallel_ranks_have(here: Here) -> float:
    """Copies of an expert drift apart if its tensor-parallel size is below that of the other layers.

    To reproduce: train a GPTModel with four experts for every token on two ranks, with `tensor_model_parallel_size=2`,
    `sequence_parallel=True`, `expert_tensor_parallel_size=1` and `expert_model_parallel_size=1`, in
    DistributedDataParallel. Compare the weights of the experts after three steps of SGD with those of one rank alone.

    Both ranks have all experts, and each sends them its own half of the tokens. Their gradients have to be summed over
    both. But weights of experts say `allreduce=False` only if `expert_model_parallel_size` is above one. So they are
    reduced over the data-parallel ranks, which is each rank alone. 0.12 crashes in forward: its local layers scatter
    the output of such an expert over the tensor-parallel ranks of the other layers.

    Fixed in 0.19 by Megatron-LM pull request 5916.
    """
    return error(here, Layout(tp=2, sequence_parallel=True, etp=1))


@proof("weights of experts off by {:.1e}", bound=1e-5, ranks=2)
def experts_that_are_cut_where_other_layers_are_not(here: Here) -> float:
    """Gradients of different parts of an expert are summed if only experts are tensor-parallel.

    To reproduce: train a GPTModel with four experts on two ranks, with `tensor_model_parallel_size=1`,
    `expert_tensor_parallel_size=2` and `expert_model_parallel_size=1`, in DistributedDataParallel. Compare the
    weights of the experts after three steps of SGD with those of one rank alone that gets the rows of both.

    Each rank has its own half of every expert, and the two are data-parallel for all other layers. The halves are
    reduced as if they were copies, because weights of experts say `allreduce=False` only if
    `expert_model_parallel_size` is above one.

    Fixed in 0.19 by Megatron-LM pull request 5916.
    """
    return error(here, Layout(etp=2))
