"""Training steps of models made of Transformer Engine's layers, on a GPU and with all patches.

A packed row gives what its sequences give alone, and a recompute of quantized layers changes no bit.
These have not run on a GPU yet. On a CPU the models were built, and trained for the same steps in fp32 by stand-ins.
Nothing of Transformer Engine or megatron-core is imported before a test runs, so that this file is collected anywhere.
"""

import os
from unittest import mock

import pytest
import te_models
import torch

import shim
from shim import testing
from shim.testing.fp8 import state_manager
from shim.testing.generic import FULL
from shim.testing.oracle import differences, worst
from shim.testing.proof import CannotRunError, Here, measure
from shim.testing.user_model import Build, built, moved, packed

pytestmark = pytest.mark.gpu

MODELS = ["dense", "multi_token", "experts", "latent"]
# What megatron-core calls a recipe, and the question to Transformer Engine whether this GPU can do it.
RECIPES = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
PARTS = ["layernorm", "core_attn", "mlp"]
STEPS, RATE = 3, 0.1
LENGTHS, ALIGN = (50, 100, 80), 16  # quantized products take multiples of 16 rows


@pytest.fixture(autouse=True)
def the_same_twice():
    """No kernel that adds up in another order the second time."""
    with mock.patch.dict(os.environ, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}):
        yield


@pytest.mark.parametrize("name", ["packed-equals-alone", "packed-recompute-equals-none", "save-and-load"])
@pytest.mark.parametrize("model", MODELS)
def test_generic_proofs_hold(model, name):
    [found] = [each for each in testing.generic_proofs(getattr(te_models, model)) if each.name == name]
    with shim.patched():
        side = measure(found, Here("cuda"))
    if side.state == "cannot run":
        pytest.skip(side.text)
    assert side.state == "right", side.text


@pytest.mark.parametrize("recompute", ["full", *PARTS])
@pytest.mark.parametrize("model", ["dense", "multi_token"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recompute_of_quantized_layers_changes_no_bit(recipe, model, recompute):
    options = {"recompute_granularity": "selective", "recompute_modules": [recompute]}
    options = FULL if recompute == "full" else options
    with shim.patched():
        Here("cuda").run(_same_bits, getattr(te_models, model), recipe, options)


def _same_bits(build, recipe, options):
    able, why = getattr(state_manager(), RECIPES[recipe])()
    if not able:
        pytest.skip(f"this GPU cannot do {recipe}: {why}")
    quantized = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
    try:
        plain, again, recomputed = (_trained(build, **quantized, **each) for each in ({}, {}, options))
    except CannotRunError as error:
        pytest.skip(str(error))
    if any(_off(plain, again)):
        pytest.skip(f"two runs without recompute differ already: {_off(plain, again)}")
    assert _off(plain, recomputed) == [0.0] * STEPS


def _off(truth, found):
    return [worst(differences(b, a)) for a, b in zip(truth, found, strict=True)]


def _trained(build, **options):
    """Losses and gradients of each step on a packed row, with the same weights at first."""
    state_manager().reset()
    model = built(Build.of(build), "cuda", **options)
    _seeded(model)
    found = []
    for _ in range(STEPS):
        row = moved(testing.pack(testing.random_sequences(LENGTHS, 128), align=ALIGN), "cuda")
        found.append(packed(model, row))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in found[-1].grads:
                    weight.sub_(RATE * found[-1].grads[name].to(weight))
                weight.grad = None
    return found


@torch.no_grad()
def _seeded(model):
    generator = torch.Generator().manual_seed(5)
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
