"""Proof of gated-attention-few-groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_layers import largest_error
from shim.testing import CPUCoreAttention, Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import Here, LacksFeatureError, proof

TOKENS, BATCH, HIDDEN, HEADS = 6, 2, 16, 4


def build(groups: int = 1, **overrides: Any) -> Any:
    """Gated self attention for this tensor-parallel size, with (its part of) the same weights for every size."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "attention_output_gate" not in TransformerConfig.__dataclass_fields__:
        raise LacksFeatureError("this release has no gated attention")
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": groups,
        "attention_output_gate": True,
        "add_bias_linear": False,
        **ON_CPU,
        "tensor_model_parallel_size": size,
    }
    spec = gpt_layer_specs.get_gpt_layer_local_spec().submodules.self_attention
    spec.submodules.core_attention = CPUCoreAttention
    layer = build_module(spec, config=TransformerConfig(**{**settings, **overrides}), layer_number=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(layer.named_parameters()):
            dim, shape = sharded_dim(name), list(weight.shape)
            shape[dim] *= size
            weight.copy_((torch.randn(shape, generator=generator) * 0.3).chunk(size, dim)[rank])
    return layer


def sharded_dim(name: str) -> int:
    """Along which dimension ranks have parts of a weight."""
    return 1 if "linear_proj" in name else 0


def trained(groups: int = 1) -> dict[str, Tensor]:
    """Of one forward and backward pass: the output [s, b, h], and the gradients of hidden states and weights."""
    layer = build(groups)
    # The gate is compiled by itself, which a forked rank cannot do once its parent has.
    with torch.compiler.set_stance("force_eager"):
        return _of_one_pass(layer)


def _of_one_pass(layer: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(TOKENS, BATCH, HIDDEN, generator=generator) for _ in "hw")
    output = layer(hidden.requires_grad_(), None)[0]
    (output * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    assert hidden.grad is not None
    return {"output": output.detach(), "hidden": hidden.grad, **gradients}


def error(found: dict[str, Tensor], expected: dict[str, Tensor], rank: int, ranks: int) -> float:
    """The largest relative error of a rank's output and gradients against those of one rank."""

    def right(name: str) -> Tensor:
        return expected[name].chunk(ranks, sharded_dim(name))[rank] if "weight" in name else expected[name]

    return largest_error(found, right)


@proof(
    "output and gradients off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: shape '.*' is invalid for input of size",
)
def ranks_that_share_a_query_group_gate_their_own_heads(here: Here) -> float:
    """Gated attention crashes if tensor-parallel ranks share a query group.

    To reproduce: on two tensor-parallel ranks run a SelfAttention with `attention_output_gate=True`, four heads and
    `num_query_groups=1`.

    SelfAttention.get_query_key_value_tensors gathers the group and gives each rank its own heads of the query, but the
    gate of all heads. _apply_output_gate cannot view the gate in the shape of the output: a RuntimeError. Right is
    what one rank computes. In 0.16; 0.17 also takes the rank's own heads of the gate, by pull request 3575.
    """
    (expected,) = here.run(trained)
    ranks = here.run(trained, layout=Layout(tp=here.world))
    return max(error(found, expected, rank, here.world) for rank, found in enumerate(ranks))
