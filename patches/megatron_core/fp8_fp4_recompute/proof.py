"""Proofs of fp8-fp4-recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.testing.cpu import storage_shared_in_python
from shim.testing.fp8_layer import delayed_scaling, fp8_linear, fp8_region, fresh_fp8_state
from shim.testing.proof import CannotRunError, Here, proof

WIDTH, TOKENS, STEPS = 64, 32, 4

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def plainly(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    return function(values)


def by_megatron(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(function, False, values)


def without_output(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Discards what `function` returns, and has it computed again in backward."""
    from megatron.core.tensor_parallel import random

    checkpoint = random.CheckpointWithoutOutput()
    result: Tensor = checkpoint.checkpoint(function, values).sin()
    checkpoint.discard_output_and_register_recompute(result)
    return result


def with_output(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    return function(values).sin()


def gradients_of_layers(run: Run, device: str) -> list[Tensor]:
    """Of the weights of two quantized layers, over some steps without an update."""
    generator = torch.Generator().manual_seed(1)
    found = []
    with fresh_fp8_state():
        recipe = delayed_scaling(device=device)
        model = nn.Sequential(fp8_linear(WIDTH, device, 1), nn.GELU(), fp8_linear(WIDTH, device, 2))
        weights = list(model.parameters())
        for _ in range(STEPS):
            values = torch.randn(TOKENS, WIDTH, generator=generator).to(weights[0]).requires_grad_()
            with fp8_region(recipe):
                output = run(model, values)
            output.float().square().mean().backward()
            for weight in weights:
                assert weight.grad is not None
                found.append(weight.grad.clone())
                weight.grad = None
    return found


def worst_error(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative error, by norm."""
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, right, strict=True))


@proof("gradient off by {:.1e}", right="bit-equal", te=True, devices=("cpu", "cuda"))
def a_recompute_is_quantized_as_its_forward_pass(here: Here) -> float:
    """tensor_parallel.checkpoint recomputes outside of the FP8 region of its forward pass.

    To reproduce: run two linear layers of Transformer Engine by `tensor_parallel.checkpoint(model, False, x)` inside
    `transformer_engine.pytorch.fp8_autocast(enabled=True)`, leave the region, and call backward. Compare the gradients
    of the weights with those of the same step without the checkpoint.

    The checkpoint restores the random states for the recompute, and not the region. So the forward pass runs in FP8,
    and backward takes activations of a recompute in BF16. The gradient is that of neither, and nothing says so. Right
    is the gradient without the checkpoint, to the bit: recompute trades time for memory and nothing else.

    All recipes, FP8 and FP4, from 0.12 on. Megatron-LM issue 7538.
    """
    right = here.run(gradients_of_layers, plainly, here.device)[0]
    return worst_error(here.run(gradients_of_layers, by_megatron, here.device)[0], right)


@proof("gradient off by {:.1e}", right="bit-equal", te=True, devices=("cpu", "cuda"), variants=("v0_12",))
def a_discarded_output_is_quantized_as_its_forward_pass(here: Here) -> float:
    """CheckpointWithoutOutput recomputes outside of the FP8 region of its forward pass.

    To reproduce: run the two layers of the other proof by `CheckpointWithoutOutput().checkpoint`, take the sine of the
    output, and discard the output. Right is the gradient without the checkpoint, to the bit.

    In 0.12. From 0.13 on the checkpoint enters the region again.
    """
    right = here.run(gradients_of_layers, with_output, here.device)[0]
    return worst_error(here.run(gradients_of_layers, without_output, here.device)[0], right)


LAYERS = 2


def layers_in_bf16() -> float:
    from megatron.core.enums import Fp8Recipe

    if not hasattr(Fp8Recipe, "mxfp8") or not hasattr(_recipes(), "MXFP8BlockScaling"):
        raise CannotRunError("this Transformer Engine, or megatron-core, has no MXFP8")
    full: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model: Any = testing.build_gpt(mtp_num_layers=None, num_layers=LAYERS, fp8="hybrid", fp8_recipe="mxfp8", **full)
    quantized: list[bool] = []
    for layer in model.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: quantized.append(testing.fp8_state().enabled))
    testing.run_packed(model, testing.pack(testing.random_sequences([5, 7, 4])))
    return 2 * LAYERS - sum(quantized)


def _recipes() -> Any:
    from transformer_engine.common import recipe

    return recipe


@proof("{:.0f} of 4 runs of a layer not quantized", right="every layer quantized", te=True, variants=("v0_12",))
def recomputed_layers_are_quantized(here: Here) -> float:
    """With full recompute, a model with fp8_recipe other than "delayed" trains without any FP8.

    To reproduce: build a GPTModel of two layers with fp8="hybrid", fp8_recipe="mxfp8" and recompute_granularity="full",
    run a step, and look in each layer's forward pre-hook whether `FP8GlobalStateManager.is_fp8_enabled()`.

    TransformerBlock.forward enters the region of each layer only if it does not recompute. `_checkpointed_forward`
    enters none, so that the two layers run unquantized, both in the forward pass and in the recompute. Right: every
    layer runs in its region, as without recompute. Only 0.12; 0.13 enters the regions inside of the checkpoint.
    """
    return float(here.run(layers_in_bf16)[0])


def gradient(recompute: bool) -> list[Tensor]:
    """Of a layer whose output is discarded after the operation that takes it."""
    from megatron.core.tensor_parallel import random

    generator = torch.Generator().manual_seed(3)
    weight, values = (torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(2))
    layer = lambda given: nn.functional.gelu(given @ weight)  # noqa: E731
    with storage_shared_in_python():
        if recompute:
            checkpoint = random.CheckpointWithoutOutput()
            result = checkpoint.checkpoint(layer, values).sin()
            checkpoint.discard_output_and_register_recompute(result)
        else:
            result = layer(values).sin()
        result.sum().backward()
    assert weight.grad is not None and values.grad is not None
    return [weight.grad, values.grad]


@proof(
    "gradient off by {:.1e}",
    right="bit-equal",
    defect="crash",
    crashes="^NameError: .*FP8GlobalStateManager",
    variants=("v0_13", "v0_16"),
)
def an_output_is_recomputed_without_transformer_engine(here: Here) -> float:
    """CheckpointWithoutOutput raises NameError without Transformer Engine.

    To reproduce, without Transformer Engine: `CheckpointWithoutOutput().checkpoint(function, x)`. So does every model
    with selective recompute of "layernorm", "moe_act" or "mla_up_proj".

    The constructor asks FP8GlobalStateManager whether FP8 is on. megatron-core guards the import of that name, and not
    its use. Right is what 0.12 does: without Transformer Engine there is no FP8, and the gradient is that without the
    checkpoint, to the bit. From 0.13 on.
    """
    from megatron.core.tensor_parallel import random

    if getattr(random, "HAVE_TE", False):
        raise CannotRunError("Transformer Engine is installed, and this is about its absence")
    return worst_error(here.run(gradient, True)[0], here.run(gradient, False)[0])
