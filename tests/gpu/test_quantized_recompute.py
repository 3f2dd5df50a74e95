"""Real FP8 and FP4 on a GPU: a recompute gives the bits of a run without it, scales and amax histories included.

Nothing of Transformer Engine or megatron-core is imported before a test runs, so that this file is collected anywhere.
"""

import contextlib

import pytest
import torch

import shim
from shim.patches.megatron_core.fp8_fp4_recompute.gpu_proof import (
    RECIPES,
    ROWS,
    STEPS,
    WIDTH,
    by_transformer_engine,
    clean_state,
    different,
    may_be_recomputed,
    plain_run,
    recipe_of,
    stack,
    trained,
    transformer_layer,
)
from shim.patches.megatron_core.fp8_fp4_recompute.proof import by_megatron, plainly
from shim.testing.fp8 import state_manager
from shim.testing.fp8_layer import fp8_region
from shim.testing.proof import CannotRunError

pytestmark = pytest.mark.gpu

IDS = ["fp8-fp4-recompute", "te-fp8-state"]


@pytest.fixture(autouse=True)
def clean():
    with clean_state():
        yield


@contextlib.contextmanager
def skipping():
    """A test that cannot run here is skipped, and says why."""
    try:
        yield
    except CannotRunError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("build", [stack, transformer_layer])
@pytest.mark.parametrize("run", [by_megatron, by_transformer_engine])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recompute_gives_the_bits_of_a_run_without(name, run, build):
    with skipping():
        may_be_recomputed(name)
        recipe = recipe_of(name)
    plain = plain_run(build, recipe)
    with shim.patched(only=IDS, require=IDS[:1]):
        recomputed = trained(build, recipe, run)
    assert any("weight" in key for key, _ in plain)
    moved = [value for key, value in plain if key.endswith(".scale")]
    if name == "DelayedScaling":
        per_step = len(moved) // STEPS
        assert per_step and not all(map(torch.equal, moved[:per_step], moved[-per_step:]))
    differing = different(recomputed, plain)
    if run is by_transformer_engine and name == "DelayedScaling":
        # Leaving its recompute, TE reduces once more and moves the history on: nobody's patch.
        differing = [key for key in differing if not key.endswith(".amax_history")]
    assert differing == []


@pytest.mark.parametrize("name", RECIPES)
def test_stock_recomputes_in_bf16(name):
    """So that what backward takes differs from what the forward pass has computed."""
    recompute = []
    with skipping():
        recipe = recipe_of(name)

    def watched(given):
        recompute.append(state_manager().is_fp8_enabled())
        return model(given)

    model = stack()
    plain = trained(stack, recipe, plainly)
    try:
        stock = trained(stack, recipe, by_megatron)
    except Exception as error:  # some releases of TE crash instead
        assert "fp8" in str(error).lower() or isinstance(error, (KeyError, AttributeError, AssertionError))
    else:
        assert different(stock, plain)
    state_manager().reset()
    with fp8_region(recipe):
        output = by_megatron(watched, torch.randn(ROWS, 4, WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_())
    with contextlib.suppress(Exception):
        output.float().sum().backward()
    assert recompute == [True, False]
