"""Proofs of te-fp8-state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.fp8_layer import delayed_scaling, fp8_linear, fp8_region, fresh_fp8_state
from shim.testing.proof import Here, Measured, proof

WIDTH, TOKENS = 64, 32
SIZES = (1.0, 1.25, 1.5, 1.75)


def by_transformer_engine(function: Any, values: Tensor, **options: bool) -> Tensor:
    from transformer_engine.pytorch.distributed import checkpoint

    # A function, because it hands modules without TE layers on to torch's checkpoint.
    result: Tensor = checkpoint(lambda given: function(given), values, **options)
    return result


def gradient_of_a_layer(recompute: bool, device: str, **options: bool) -> Tensor:
    """Of the weight of a quantized layer [WIDTH, WIDTH], by the sum of the losses of microbatches of growing size.

    options: of Transformer Engine's checkpoint.
    """
    generator = torch.Generator().manual_seed(1)
    with fresh_fp8_state():
        layer, recipe = fp8_linear(WIDTH, device), delayed_scaling(device=device)
        (weight,) = layer.parameters()
        losses = []
        for size in SIZES:
            values = (size * torch.randn(TOKENS, WIDTH, generator=generator)).to(weight).requires_grad_()
            with fp8_region(recipe):
                output = by_transformer_engine(layer, values, **options) if recompute else layer(values)
            losses.append(output.float().square().mean())
        torch.stack(losses).sum().backward()
        assert weight.grad is not None
        return weight.grad


@proof("gradient off by {:.1e}", right="bit-equal", te=True, devices=("cpu", "cuda"))
def a_recompute_takes_the_scales_of_its_forward_pass(here: Here) -> float:
    """Under delayed scaling, a recompute by transformer_engine's checkpoint takes the scales of another forward pass.

    To reproduce: run four microbatches of growing size through `te.Linear` by `te.distributed.checkpoint`, each in its
    own `te.fp8_autocast` with DelayedScaling. Add up the four losses and call backward once. Compare the gradient of
    the weight with that of the same run without the checkpoint.

    The scales of the forward passes wait in a queue of the process, first in, first out. Autograd runs the recomputes
    in the opposite order, so that each takes the scale of another microbatch: values saturate or are rounded otherwise.
    The same happens to a layer that serves several MTP depths, and after a forward pass without backward. In 2.1 the
    recompute runs outside of the FP8 region altogether.

    Right is the gradient without the checkpoint, to the bit. From 2.1 on.
    """
    found, right = (here.run(gradient_of_a_layer, recompute, here.device)[0] for recompute in (True, False))
    return float((found.double() - right.double()).norm() / right.double().norm())


def gradient_without_reentrance(device: str) -> Tensor:
    return gradient_of_a_layer(True, device, use_reentrant=False)


@proof("gradient off by {:.1e}", right="bit-equal", te=True, devices=("cpu", "cuda"))
def a_recompute_without_reentrance_takes_the_scales_of_its_forward_pass(here: Here) -> float:
    """Under delayed scaling, a recompute with `use_reentrant=False` takes the scales of another forward pass.

    To reproduce: run the other proof with `te.distributed.checkpoint(..., use_reentrant=False)`. This checkpoint runs
    the function again by hooks on saved tensors, in the contexts of `get_activation_recompute_contexts`, whose queue is
    the same. Right is the gradient without the checkpoint, to the bit. From 2.1 on.
    """
    found = here.run(gradient_without_reentrance, here.device)[0]
    right = here.run(gradient_of_a_layer, False, here.device)[0]
    return float((found.double() - right.double()).norm() / right.double().norm())


HISTORY, STEPS = 6, 8


def scales_of_steps(recompute: bool, device: str) -> list[float]:
    """log2 of the scale of the last layer's input after each step of three layers, whose input becomes ever smaller."""
    generator = torch.Generator().manual_seed(1)
    found = []
    with fresh_fp8_state():
        recipe = delayed_scaling(HISTORY, device)
        layers: list[Any] = [fp8_linear(WIDTH, device, seed) for seed in range(3)]
        for step in range(STEPS):
            values = torch.randn(TOKENS, WIDTH, generator=generator).to(next(layers[0].parameters()))
            hidden = (values / 2**step).requires_grad_()
            with fp8_region(recipe):
                for layer in layers:
                    hidden = by_transformer_engine(layer, hidden) if recompute else layer(hidden)
            hidden.float().sum().backward()
            found.append(float(layers[-1].fp8_meta["scaling_fwd"].scale[0].log2()))
    return found


@proof(
    "scales off by a factor of 2^{:.1f}",
    right="the same scales",
    te=True,
    devices=("cpu", "cuda"),
    curve="log2 of the scale",
)
def a_recompute_leaves_scales_as_they_were(here: Here) -> Measured:
    """Under delayed scaling, each recompute by transformer_engine's checkpoint moves the amax histories on.

    To reproduce: train three `te.Linear` layers for some steps by `te.distributed.checkpoint(layer, hidden)` each,
    inside `te.fp8_autocast` with DelayedScaling(amax_history_len=6, amax_compute_algo="max") and with input that
    becomes smaller in each step. Write down the scale after each step, with the checkpoint and without.

    The recompute enters the region again. Leaving it reduces amax over ranks and shifts every history by one entry,
    once for each recomputed layer, although the forward pass has done so. The history of six steps forgets within two.
    It also costs a collective for each recompute. Up to 2.3 the recompute loses the new scales instead.

    Right: recompute changes no scale. From 2.1 on.
    """
    truth = here.run(scales_of_steps, False, here.device)[0]
    measured = here.run(scales_of_steps, True, here.device)[0]
    return Measured(max(abs(a - b) for a, b in zip(measured, truth)), {"truth": truth, "measured": measured})


def regions_that_stay() -> float:
    from transformer_engine.common import recipe

    names = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
    recipes = [None, *(getattr(recipe, name)() for name in names if hasattr(recipe, name))]
    stayed = 0
    with testing.te_cuda_stand_ins(capability=(8, 0)):
        for one in recipes:
            with fresh_fp8_state():
                try:
                    with fp8_region(one):
                        raise RuntimeError("a GPU without FP8 was let into an FP8 region")
                except (AssertionError, RuntimeError):
                    stayed += testing.fp8_state().enabled
    return float(stayed)


@proof("FP8 stays on after {:.0f} refused recipes", right="FP8 is off", te=True)
def a_refused_region_leaves_fp8_off(here: Here) -> float:
    """fp8_autocast that refuses a recipe leaves FP8 switched on.

    To reproduce, on a GPU without FP8: enter `te.fp8_autocast(enabled=True)` without a recipe, catch the error that
    says so, and ask `FP8GlobalStateManager.is_fp8_enabled()`.

    The region sets its state before it checks the device, and the error comes between. Every layer that runs later is
    then quantized, or raises. From 2.7 on it checks first, but neither NVFP4 nor the default recipe.

    Right: what was not entered leaves no trace. From 2.1 on.
    """
    return float(here.run(regions_that_stay)[0])
