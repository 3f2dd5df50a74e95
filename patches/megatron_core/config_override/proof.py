"""Proof of config-override."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.patches._proof_config_override import overridden, toggled
from shim.testing.cpu import storage_shared_in_python
from shim.testing.proof import Here, Measured, proof

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TOKENS, STEPS, RATE = 12, 8, 0.1


def training(override: Any, **recompute: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The gradients of the first step, and the loss of each step, of a model that runs with interleaved rotations."""
    model: Any = testing.build_gpt(mtp_num_layers=None, **recompute)
    ids = torch.arange(1, TOKENS + 1)[None]
    first: dict[str, torch.Tensor] = {}
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        with override(model.config, rotary_interleaved=True):
            loss = model(input_ids=ids, position_ids=ids - 1, attention_mask=None, labels=ids.flip(1)).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        first = first or {name: weight.grad.clone() for name, weight in model.named_parameters()}
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(RATE * weight.grad)
    return first, losses


def two_trainings() -> Measured:
    """The error of the first gradient, and the losses with recompute and without."""
    found, measured = training(overridden, **FULL)
    right, truth = training(toggled)
    wrong = sum(float((found[name] - right[name]).double().square().sum()) for name in right)
    norm = sum(float(gradient.double().square().sum()) for gradient in right.values())
    return Measured((wrong / norm) ** 0.5, {"truth": truth, "measured": measured})


@proof("gradient off by {:.1e}", right="bit-equal")
def a_recompute_sees_the_config_of_its_forward_pass(here: Here) -> Measured:
    """A config that is changed around a forward pass is recomputed with the restored value.

    To reproduce: build a GPTModel with full recompute. Set `model.config.rotary_interleaved = True` around its forward
    pass only, as trainers do with flags that one kind of batch needs, and restore it before backward. Compare the
    gradients with those of the same run without recompute.

    Backward runs every layer once more, and reads the config then. So the gradient is that of another function than the
    one whose loss was computed, and nothing says so. Right are the gradients without recompute, to the bit: what is
    recomputed has to see the values that its forward pass saw.

    From 0.12 to 0.20. megatron-core has no means for it.
    """
    measured: Measured = here.run(two_trainings)[0]
    return measured


class Scale:
    """A config that the recomputed function reads."""

    factor = 3.0


def gradient_of_a_discarded_output(override: Any, recompute: bool) -> float:
    """Of factor * x**2 at 1, run with factor 5, with the output discarded or not."""
    from megatron.core.tensor_parallel import random

    config, given = Scale(), torch.ones((), requires_grad=True)
    with storage_shared_in_python():
        checkpoint = random.CheckpointWithoutOutput() if recompute else None
        if checkpoint:
            checkpoint.fp8 = False  # as with fp8=None; else it needs Transformer Engine
        scaled = lambda x: config.factor * x * x  # noqa: E731
        with override(config, factor=5.0):
            result = (checkpoint.checkpoint(scaled, given) if checkpoint else scaled(given)).sin()
            if checkpoint:
                checkpoint.discard_output_and_register_recompute(result)
        result.backward()
    assert given.grad is not None
    return float(given.grad)


@proof("gradient off by {:.1e}", right="bit-equal")
def a_discarded_output_sees_the_config_of_its_forward_pass(here: Here) -> float:
    """A config that is changed around a forward pass is restored when CheckpointWithoutOutput recomputes the output.

    To reproduce: run a function that reads a field of a config by `CheckpointWithoutOutput().checkpoint`, with another
    value of the field around it. Take the sine of the output, discard the output, restore the field, and call backward.
    Selective recompute of "layernorm", "moe_act" and "mla_up_proj" checkpoints so. Without Transformer Engine, set
    `fp8 = False` on the checkpoint first.

    The output is computed again with the restored value, and the gradient is that of another function. Right is the
    gradient without a checkpoint, to the bit. From 0.12 to 0.20. megatron-core has no means for it.
    """
    right = here.run(gradient_of_a_discarded_output, toggled, False)[0]
    found = here.run(gradient_of_a_discarded_output, overridden, True)[0]
    return float(abs(found - right) / abs(right))
