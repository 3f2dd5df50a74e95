"""Proofs of checkpoint-without-grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.testing.cpu import storage_shared_in_python
from shim.testing.proof import Here, proof

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEPS, RATE = 3, 0.2


def trained(model: Any, step: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The weights after some steps of SGD. A weight without a gradient stays what it is."""
    for _ in range(STEPS):
        model.zero_grad()
        step(model).backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.sub_(RATE * weight.grad)
    return dict(model.named_parameters())


def unequal(found: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    """How many weights differ in any bit."""
    return sum(not torch.equal(found[name], right[name]) for name in right)


def with_frozen_layer(**options: Any) -> nn.Module:
    """Two layers with adapters behind trained embeddings. The first is frozen, and a hook stops gradients behind it."""
    model: Any = testing.build_gpt(mtp_num_layers=None, share_embeddings_and_output_weights=False, **options)
    testing.add_lora(model)
    model.embedding.word_embeddings.weight.requires_grad_(True)
    first = model.decoder.layers[0].requires_grad_(False)
    first.register_forward_hook(lambda module, inputs, output: (output[0].detach(), *output[1:]))
    return model


def step_of_model(model: Any) -> Tensor:
    ids = torch.arange(12)[None]
    loss: Tensor = model(ids, ids, None, labels=ids.roll(-1)).mean()
    return loss


def unequal_behind_frozen_layer() -> int:
    right, found = (trained(with_frozen_layer(**options), step_of_model) for options in ({}, UNIFORM))
    return unequal(found, right)


@proof(
    "{:.0f} weights trained otherwise",
    right="bit-equal",
    defect="crash",
    crashes=r"^ValueError: not enough values to unpack",
)
def a_frozen_layer_that_stops_gradients_is_recomputed(here: Here) -> int:
    """Full recompute crashes if a layer lets no gradient through.

    To reproduce: build a GPTModel with two layers and `recompute_granularity="full"`, `recompute_method="uniform"`,
    `recompute_num_layers=1`. Freeze the first layer, detach its output by a forward hook, because nothing in front of
    it is to be trained, and run a step. Backward raises "ValueError: not enough values to unpack (expected 2, got 0)".

    The output of the first checkpoint requires a gradient, because the embeddings do. In its recompute no output
    requires one, and `CheckpointFunction.backward` finds nothing to run backward from. Right are the weights that
    training without recompute gives. Open upstream.
    """
    wrong: int = here.run(unequal_behind_frozen_layer)[0]
    return wrong


class Attention(nn.Module):
    """As multi-latent attention: query and value are made from compressed states by a frozen up-projection."""

    query_down: Tensor
    value_down: Tensor
    query_up: Tensor
    value_up: Tensor
    output: Tensor

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(1)
        for name in ("query_down", "value_down", "query_up", "value_up", "output"):
            weight = torch.randn(8, 8, generator=numbers)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=name == "query_down"))
        self.recompute = recompute

    def up(self, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return query @ self.query_up, value @ self.value_up

    def forward(self, states: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

        compressed = states @ self.query_down, states @ self.value_down
        if not self.recompute:
            query, value = self.up(*compressed)
            return (query.tanh() * value) @ self.output
        checkpoint = CheckpointWithoutOutput()
        query, value = checkpoint.checkpoint(self.up, *compressed)
        attended = query.tanh() * value
        checkpoint.discard_output_and_register_recompute(attended)
        return attended @ self.output


def step_of_attention(model: Any) -> Tensor:
    loss: Tensor = model(torch.randn(5, 8, generator=torch.Generator().manual_seed(2))).square().mean()
    return loss


def unequal_up_projections() -> int:
    with storage_shared_in_python():
        right, found = (trained(Attention(recompute), step_of_attention) for recompute in (False, True))
    return unequal(found, right)


@proof(
    "{:.0f} weights trained otherwise",
    right="bit-equal",
    defect="crash",
    crashes=r"^RuntimeError: element 1 of tensors does not require grad",
    beside=("fp8-fp4-recompute",),
)
def an_adapter_at_the_query_is_trained_through_a_recomputed_up_projection(here: Here) -> int:
    """CheckpointWithoutOutput crashes if only some of its outputs require a gradient.

    To reproduce: checkpoint a function of two tensors that returns two, one made from each, as the up-projection of
    multi-latent attention is (`recompute_modules=["mla_up_proj"]`). Let the first tensor require a gradient and the
    second none, as with adapters at the query alone behind frozen embeddings. Multiply the two outputs, discard them
    with `discard_output_and_register_recompute`, and run backward. It raises "RuntimeError: element 1 of tensors does
    not require grad and does not have a grad_fn".

    All outputs of the checkpoint require a gradient, since one input does. In the recompute the second does not, and
    `CheckpointWithoutOutputFunction.backward` runs backward from both. Right are the weights that training without
    recompute gives. From 0.13 on CheckpointWithoutOutput needs Transformer Engine; without it another error comes
    first. Open upstream.
    """
    wrong: int = here.run(unequal_up_projections)[0]
    return wrong
