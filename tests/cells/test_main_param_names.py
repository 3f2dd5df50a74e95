"""main-param-names: every weight gets its own main parameter, and keys that stock can tell apart stay as they are."""

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.main_param_names import BUILD_MAP, bindings
from shim.patches.megatron_core.main_param_names.proof import (
    checkpoint_of,
    main_params_of,
    optimizer_of,
    wrapped_model,
)

CELLS = {"0.14.0": "all"}

ID = "main-param-names"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def applied():
    return shim.patched(only=[ID], require=[ID])


def reloaded(experts, lora=False, nested=lambda state: state):
    """The main parameters after those of a checkpoint were loaded, and the checkpoint."""
    wrapped = wrapped_model(experts, lora)
    optimizer, state = optimizer_of(wrapped), checkpoint_of(wrapped)
    optimizer.reload_model_params(state_dict=nested(state))
    return main_params_of(wrapped), state


def test_what_stock_does_right_stays():
    """Up to ten experts no key begins another one."""
    with applied():
        found, _ = reloaded(10)
    expected, state = reloaded(10)
    assert found.keys() == expected.keys() < state.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("experts", [10, 12])
def test_upstreams_function_gets_other_keys_only_where_it_needs_them(experts):
    given = []
    wrapper = bindings("v0_14", {})[BUILD_MAP](lambda self, state_dict: given.append(state_dict))
    state = checkpoint_of(wrapped_model(experts))
    wrapper(None, state_dict=state)
    assert given == [state]
    assert (given[0] is state) == (experts == 10)


@pytest.mark.parametrize(
    "nested",
    [
        lambda state: {"model": state, "iteration": 1},
        lambda state: {"model0": state},
        lambda state: {"model_0": state},
        lambda state: {f"module.{key}": value for key, value in state.items()},
    ],
    ids=["model", "model0", "model_0", "prefix"],
)
def test_in_every_form_of_checkpoint_that_stock_takes(nested):
    with applied():
        found, state = reloaded(12, nested=nested)
    assert all(torch.equal(found[name], state[name].flatten()) for name in found)


def test_only_adapters_have_main_parameters():
    """LoRA: all other weights are frozen, and their keys are looked for nevertheless."""
    with applied():
        found, state = reloaded(12, lora=True)
    assert found
    assert all(".lora." in name and torch.equal(found[name], state[name].flatten()) for name in found)


def test_a_key_that_is_missing_raises_the_error_of_stock():
    def without(state):
        return {key: value for key, value in state.items() if not key.endswith("fc1.weight1")}

    with applied(), pytest.raises(AssertionError, match=r"linear_fc1\.weight1 has 0 matches in state dict"):
        reloaded(12, nested=without)
