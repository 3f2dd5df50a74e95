"""One step of an override of MultiTokenPredictionLayer._checkpointed_forward on a tiny input, for the probes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.patches._stubs import WIDTH, PaddedRow, config_of, device_of, taken_by, view_of

# What the layer of some release passes by keyword.
USUAL = ("hidden_states", "decoder_input", "attention_mask", "packed_seq_params")


class Step:
    """In the place of the layer's weights: a function of one weight, which counts its calls and keeps the rows.

    freed: whether the input states had no memory left after backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.full((), 3.0, device=device, requires_grad=True)
        self.rows: list[Any] = []
        self.freed = False

    def __call__(self, hidden_states: Tensor, decoder_input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.rows.append(kwargs.get("packed_seq_params"))
        return hidden_states * self.weight + decoder_input


def runs_full_recompute(layer: Any) -> bool:
    """Whether the layer's config recomputes whole layers; if not, no override of the method runs."""
    return bool(layer.config.recompute_granularity == "full")


def tried(layer: Any, row: PaddedRow | None, trained: bool = True) -> tuple[Step, bool]:
    """One step of the override, forward and backward. Returns the stub, and whether all gradients are right.

    row: the packed row that the layer gets.    trained: whether the inputs require a gradient.
    """
    device = device_of(layer)
    step = Step(device)
    given = row.params if row is not None else None

    def with_row(*args: Any, **kwargs: Any) -> Tensor:  # up to 0.17 the layer passes a function, which may have the row
        return step(*args, **{"packed_seq_params": given, **kwargs})

    config = config_of(layer, fp8=None, fp4=None)
    view = view_of(layer, config, _proj_and_transformer_layer=step, training=True)
    states, inputs = (torch.full((10, 1, WIDTH), value, device=device) for value in (2.0, 5.0))
    if trained:
        states.requires_grad_()
        inputs.requires_grad_()
    given_all = {"hidden_states": states, "decoder_input": inputs, "attention_mask": None, "packed_seq_params": given}
    arguments = taken_by(view._checkpointed_forward, USUAL, forward_func=with_row, **given_all)
    output = view._checkpointed_forward(**arguments)
    # Before backward, which may free the inputs where a trainer has replaced CheckpointFunction.backward.
    expected = [(step.weight, states.detach().sum())]
    output.sum().backward()
    step.freed = states.untyped_storage().size() == 0
    if trained:
        expected += [(states, torch.full_like(states, 3.0)), (inputs, torch.ones_like(inputs))]
    return step, all(leaf.grad is not None and torch.equal(leaf.grad, right) for leaf, right in expected)
