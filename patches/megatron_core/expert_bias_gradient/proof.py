"""Proofs of expert-bias-gradient."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, LacksFeatureError, proof

EXPERTS = 4
MODEL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "mtp_num_layers": None,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": True,
}
STEPS, ROWS, TOKENS, LR = 3, 2, 16, 0.5


def wrapped_model(**options: Any) -> Any:
    """A GPTModel whose experts have biases, in DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    cut = parallel_state.get_tensor_model_parallel_world_size() > 1
    try:
        model = testing.build_gpt(**{**MODEL, "sequence_parallel": cut, **options})
    except AssertionError as error:
        if "Bias is not supported for MoE" not in str(error):
            raise
        raise LacksFeatureError("this release refuses biases of experts") from error
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def step(wrapped: Any, number: int = 0) -> None:
    """Forward, backward and the sums over ranks, for the rows of this data-parallel rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.moe import moe_utils

    rows = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
    rows = rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    wrapped.zero_grad_buffer()
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        losses = wrapped(rows, torch.arange(TOKENS).expand_as(rows), None, labels=rows.roll(-1, 1))
        losses.mean().backward()
    finalize_model_grads([wrapped])


def of_experts(wrapped: Any) -> dict[str, Tensor]:
    """The parameters of this rank's experts, by the number that an expert has among all."""
    from megatron.core import parallel_state

    here = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first = here * parallel_state.get_expert_model_parallel_rank()
    found = {name: weight for name, weight in wrapped.named_parameters() if ".local_experts." in name}
    return {
        re.sub(r"(?<=\.local_experts\.)\d+", lambda local: str(int(local[0]) + first), name): weight
        for name, weight in found.items()
    }


def training() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of this rank's experts before and after some steps of SGD."""
    with torch.compiler.set_stance("force_eager"):  # a part of the router is compiled on first use, for many seconds
        wrapped = wrapped_model()
        before = {name: weight.detach().clone() for name, weight in of_experts(wrapped).items()}
        for number in range(STEPS):
            step(wrapped, number)
            with torch.no_grad():
                for weight in wrapped.parameters():
                    weight -= LR * weight.main_grad
    return before, {name: weight.detach().clone() for name, weight in of_experts(wrapped).items()}


@proof("biases of experts off by {:.1e}", bound=1e-5, ranks=2)
def a_bias_has_the_gradient_of_its_own_expert(here: Here) -> float:
    """Biases of experts are trained with the gradients of other experts under sequence parallelism.

    To reproduce: train a GPTModel with experts and `add_bias_linear=True` from the local layer spec on two ranks, with
    `tensor_model_parallel_size=2`, `sequence_parallel=True`, `expert_model_parallel_size=2` and
    `expert_tensor_parallel_size=1`, in DistributedDataParallel. Compare the biases of the experts after three steps of
    SGD with those of `tensor_model_parallel_size=1` and the same `expert_model_parallel_size`. (With
    `expert_model_parallel_size=1` the local layers of experts with biases raise.)

    The bias of each expert's linear_fc2 says `sequence_parallel`, as that of every RowParallelLinear. So
    finalize_model_grads sums its gradient over the tensor-parallel ranks, which have different experts. Right would be
    not to: the bias says `allreduce=False`, and has been summed over the ranks that have the same expert.
    """
    before: dict[str, Tensor] = {}
    truth: dict[str, Tensor] = {}
    for start, end in here.run(training, layout=Layout(ep=2)):
        before |= start
        truth |= end
    worst = 0.0
    for _, found in here.run(training, layout=Layout(tp=2, sequence_parallel=True, ep=2, etp=1)):
        for name in (name for name in found if name.endswith("bias")):
            off = (found[name] - truth[name]).norm() / (truth[name] - before[name]).norm()
            worst = max(worst, float(off))
    return worst
