"""Proofs of one-rank-mappings."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof

EXPERTS: dict[str, Any] = {
    "add_bias_linear": True,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
}
TOKENS = 16


def trained(call: dict[str, Any] | None = None, copies: bool = False, **options: Any) -> dict[str, Tensor]:
    """The loss [1, s] and the gradients of all weights in a step, by name.

    copies: the second layer of an expert gives a copy of its output, which anybody may write to.
    """
    from megatron.core.transformer.moe import moe_utils

    model: Any = testing.build_gpt(**{"num_layers": 1, "mtp_num_layers": None, **options})
    for name, layer in model.named_modules():
        if copies and ".experts." in name and name.endswith("linear_fc2"):
            layer.register_forward_hook(lambda layer, args, out: (out[0].clone(), out[1]))
    row = torch.arange(TOKENS)[None]
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        loss = model(row, row, None, labels=row.roll(-1, 1), **(call or {}))
        loss.mean().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {**found, "loss": loss.detach()}


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest error of a gradient, over its norm or one hundredth of the largest norm."""
    assert found.keys() == right.keys()
    least = max(float(value.norm()) for value in right.values()) / 100
    return max(float((found[name] - value).norm()) / max(float(value.norm()), least) for name, value in right.items())


def error_with_biases(options: dict[str, Any]) -> float:
    """How far a step is from that of the same model, whose experts write to copies."""
    right = trained(copies=True, **EXPERTS, **options)
    assert any(name.endswith("linear_fc2.bias") for name in right)
    return distance(trained(**EXPERTS, **options), right)


@proof(
    "gradients or loss off by {:.1e}",
    bound=1e-6,
    defect="crash",
    crashes=r"^RuntimeError: Output 0 of _ReduceFromModelParallelRegion(Backward)? is a view and is being modified",
    variants=("v0_15",),
)
def local_experts_with_biases_train(here: Here) -> float:
    """A mixture of experts with biases cannot be trained on one rank.

    To reproduce: build a GPTModel with the local spec and `TransformerConfig(num_moe_experts=4, moe_router_topk=2,
    add_bias_linear=True)`, and train one step without expert parallelism. `MLP.forward` adds the bias in place to what
    RowParallelLinear returns. That is a view of an autograd function, because
    `reduce_from_tensor_model_parallel_region` also calls its function over one rank: "Output 0 of
    _ReduceFromModelParallelRegion is a view and is being modified inplace". The same model trains on two
    expert-parallel ranks.

    Right is a step whose experts write to copies.
    """
    return here.run(error_with_biases, {})[0]


@proof(
    "gradients or loss off by {:.1e}",
    bound=1e-6,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: Output 0 of _ReduceScatterToSequenceParallelRegion(Backward)? is a view and is being",
    variants=("v0_15",),
)
def local_experts_with_biases_train_under_sequence_parallelism(here: Here) -> float:
    """A mixture of experts with biases cannot be trained if only the other layers are tensor-parallel.

    To reproduce: as above, on two ranks with `tensor_model_parallel_size=2`, `expert_tensor_parallel_size=1` and
    `sequence_parallel=True`. The view comes from `reduce_scatter_to_sequence_parallel_region`.
    """
    layout = Layout(tp=2, sequence_parallel=True, etp=1)
    return max(here.run(error_with_biases, {"sequence_parallel": True}, layout=layout))


def error_of_gathering() -> float:
    return distance(trained({"runtime_gather_output": True}), trained())


@proof(
    "gradients or loss off by {:.1e}",
    bound=1e-6,
    defect="crash",
    crashes=r"^RuntimeError: Output 0 of _GatherFromModelParallelRegion(Backward)? is a view and its base",
)
def gathered_logits_train(here: Here) -> float:
    """A model in fp32 whose output layer gathers the logits cannot be trained on one rank.

    To reproduce: build a GPTModel in fp32 with `parallel_output=False`, or call it with `runtime_gather_output=True`,
    with labels, and go backward. The cross entropy takes the largest logit off in place. In fp32 these are the logits
    of `gather_from_tensor_model_parallel_region`, a view of an autograd function: "Output 0 of
    _GatherFromModelParallelRegion is a view and its base or another view of its base has been modified inplace". See
    Megatron-LM issue 6656.

    Right is the step without the gather.
    """
    return here.run(error_of_gathering)[0]
