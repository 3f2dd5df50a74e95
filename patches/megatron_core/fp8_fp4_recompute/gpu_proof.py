"""Proofs of fp8-fp4-recompute with Transformer Engine's real kernels, which need a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.megatron_core.fp8_fp4_recompute.proof import by_megatron, plainly
from shim.testing.fp8 import state_manager
from shim.testing.fp8_layer import fp8_region
from shim.testing.proof import CannotRunError, Here, proof

STEPS = 3
# (recipe, the check that says whether this GPU can do it)
RECIPES = {
    "DelayedScaling": "is_fp8_available",
    "Float8CurrentScaling": "is_fp8_available",
    "MXFP8BlockScaling": "is_mxfp8_available",
    "NVFP4BlockScaling": "is_nvfp4_available",
}
WIDTH, ROWS = 256, 128  # multiples of what every recipe needs

Module = torch.nn.Module
Values = list[tuple[str, Tensor]]


def recipe_of(name: str) -> Any:
    """The recipe of this name. CannotRunError where this Transformer Engine or this GPU has none."""
    from transformer_engine.common import recipe

    if not hasattr(recipe, name):
        raise CannotRunError(f"this Transformer Engine has no {name}")
    able, reason = getattr(state_manager(), RECIPES[name])()
    if not able:
        raise CannotRunError(f"this GPU cannot do {name}: {reason}")
    if name == "DelayedScaling":
        return recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    if name == "NVFP4BlockScaling":
        # Rounded at random, two runs would differ without any recompute.
        with contextlib.suppress(TypeError):
            return recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return getattr(recipe, name)()


def may_be_recomputed(name: str) -> None:
    """CannotRunError where Transformer Engine loses in a recompute the scales that the forward pass has updated."""
    if name == "DelayedScaling" and tuple(map(int, version("transformer_engine").split(".")[:2])) < (2, 4):
        raise CannotRunError("Transformer Engine before 2.4 loses scales in a recompute, in its own checkpoint too")


def stack() -> Module:
    """Two layers of Transformer Engine, with the same weights each time."""
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    return torch.nn.Sequential(
        te.LayerNormLinear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="cuda"),
        te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="cuda"),
    )


def transformer_layer() -> Module:
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    # Without dropout and with attention that adds up in the same order each time.
    return te.TransformerLayer(
        WIDTH, 2 * WIDTH, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device="cuda"
    )


def by_transformer_engine(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    from transformer_engine.pytorch.distributed import checkpoint

    return checkpoint(function, values)


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """No scales of earlier runs, and nothing that adds up in another order the second time."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    with mock.patch.dict(os.environ, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}):
        initialize_rng_tracker()
        state_manager().reset()
        try:
            yield
        finally:
            state_manager().reset()


def scales_of(model: Module) -> dict[str, Tensor]:
    """Scales and amax histories of the forward pass, where there are any: with delayed scaling."""
    found = {}
    for name, module in model.named_modules():
        state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
        for part in ("scale", "amax_history"):
            if isinstance(getattr(state, part, None), Tensor):
                found[f"{name}.{part}"] = getattr(state, part).detach().clone()
    return found


def trained(build: Callable[[], Module], recipe: Any, run: Callable[..., Tensor]) -> Values:
    """Everything that `STEPS` steps of training give, in order: [(name, tensor)]."""
    state_manager().reset()
    model, found = build(), Values()
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        # Larger with every step, so that scales move.
        values = (torch.randn(ROWS, 4, WIDTH, generator=generator) * 4**step).bfloat16().cuda().requires_grad_()
        with fp8_region(recipe):
            output = run(model, values)
        output.float().square().mean().backward()
        assert values.grad is not None
        found.append((f"{step} output", output.detach().clone()))
        found.append((f"{step} input", values.grad.clone()))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    found.append((f"{step} {name}", weight.grad.clone()))
                    weight.sub_(0.1 * weight.grad)
                    weight.grad = None
        found += [(f"{step} {name}", value) for name, value in scales_of(model).items()]
    return found


def different(a: Values, b: Values) -> list[str]:
    """The names of what differs in any bit."""
    if [name for name, _ in a] != [name for name, _ in b]:
        raise AssertionError(f"one run has {sorted({name for name, _ in a} ^ {name for name, _ in b})} alone")
    return [name for (name, left), (_, right) in zip(a, b, strict=True) if not torch.equal(left, right)]


def plain_run(build: Callable[[], Module], recipe: Any) -> Values:
    """What training without recompute gives. CannotRunError if it gives something else the second time."""
    plain, again = (trained(build, recipe, plainly) for _ in range(2))
    if differing := different(plain, again):
        raise CannotRunError(f"two runs without recompute differ already, in {', '.join(differing[:3])}")
    return plain


def differing_tensors(name: str) -> int:
    """How many tensors of a training with this recipe are not those of the same without recompute."""
    if find_spec("transformer_engine") is None:
        raise CannotRunError("Transformer Engine is not installed")
    with clean_state():
        recipe = recipe_of(name)
        may_be_recomputed(name)
        plain = plain_run(stack, recipe)
        return len(different(trained(stack, recipe, by_megatron), plain))


# Some releases of Transformer Engine refuse to go on in another precision.
CRASHES = r"(?i)^(RuntimeError|AssertionError|ValueError): .*\b(fp8|fp4|quantiz\w+)\b"
SAYS = "{:.0f} tensors of a training differ"


@proof(SAYS, right="bit-equal", crashes=CRASHES, devices=("cuda",), te=True)
def recompute_with_delayed_scaling(here: Here) -> float:
    """Under FP8 with delayed scaling, an activation recompute runs in BF16, so gradients are not those of FP8.

    To reproduce on a GPU that has FP8: train two layers of Transformer Engine for three steps inside
    `fp8_autocast(fp8_recipe=DelayedScaling(...))` (`autocast` from 2.9 on), once as they are, and once through
    `megatron.core.tensor_parallel.checkpoint(layers, False, values)`. Compare outputs, gradients and scales.

    `backward()` is called outside of the region, as pipeline schedules call it. The recompute restores the random
    states of the forward pass but not its region. Right would be every bit of the training without recompute: the
    region of the forward pass, and its scales. 0.12 to 0.20; Megatron-LM issue 7538.
    """
    return differing_tensors("DelayedScaling")


@proof(SAYS, right="bit-equal", crashes=CRASHES, devices=("cuda",), te=True)
def recompute_with_current_scaling(here: Here) -> float:
    """Under FP8 with current scaling, an activation recompute runs in BF16, so gradients are not those of FP8.

    To reproduce on a GPU that has FP8: train two layers of Transformer Engine for three steps inside
    `fp8_autocast(fp8_recipe=Float8CurrentScaling())` (`autocast` from 2.9 on), once as they are, and once through
    `megatron.core.tensor_parallel.checkpoint(layers, False, values)`. Compare outputs and gradients.

    `backward()` is called outside of the region, and the recompute does not enter it again. Right would be every bit of
    the training without recompute. 0.12 to 0.20; Megatron-LM issue 7538.
    """
    return differing_tensors("Float8CurrentScaling")


@proof(SAYS, right="bit-equal", crashes=CRASHES, devices=("cuda",), te=True)
def recompute_with_mxfp8(here: Here) -> float:
    """Under MXFP8, an activation recompute runs in BF16, so gradients are not those of MXFP8.

    To reproduce on a GPU that has MXFP8: train two layers of Transformer Engine for three steps inside
    `fp8_autocast(fp8_recipe=MXFP8BlockScaling())` (`autocast` from 2.9 on), once as they are, and once through
    `megatron.core.tensor_parallel.checkpoint(layers, False, values)`. Compare outputs and gradients.

    `backward()` is called outside of the region, and the recompute does not enter it again. Right would be every bit of
    the training without recompute. 0.12 to 0.20; Megatron-LM issue 7538.
    """
    return differing_tensors("MXFP8BlockScaling")


@proof(SAYS, right="bit-equal", crashes=CRASHES, devices=("cuda",), te=True)
def recompute_with_nvfp4(here: Here) -> float:
    """Under NVFP4, an activation recompute runs in BF16, so gradients are not those of NVFP4.

    To reproduce on a GPU that has NVFP4: train two layers of Transformer Engine for three steps inside
    `autocast(recipe=NVFP4BlockScaling(disable_stochastic_rounding=True))`, once as they are, and once through
    `megatron.core.tensor_parallel.checkpoint(layers, False, values)`. Compare outputs and gradients.

    `backward()` is called outside of the region, and the recompute does not enter it again. Right would be every bit of
    the training without recompute. 0.12 to 0.20; Megatron-LM issue 7538.
    """
    return differing_tensors("NVFP4BlockScaling")
