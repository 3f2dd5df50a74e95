"""clamped-activations: a clamp and an offset hold on every path, and fast paths that obey them stay."""

import logging

import pytest
import torch
import torch.nn.functional as F
from needed import needed

import shim
from shim import NotMetError, testing
from shim.patches.megatron_core.clamped_activations.proof import EXPERTS, MODEL, SHARED, trained

CELLS = {"0.19.2": "all"}

ID = "clamped-activations"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py

FUSED, OVERLAPPED, TE = "bias_activation_fusion", "moe_shared_expert_overlap", "use_te_activation_func"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def applied():
    return shim.patched(only=[ID], require=[ID])


def same(a, b):
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][k], b[1][k]) for k in a[1])


def config_of(**options):
    """The config of a model, as the model has left it."""
    return testing.build_gpt(**{**MODEL, **options}).config


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["plain", "recompute"])
@pytest.mark.parametrize(
    ("fast", "options"),
    [
        (FUSED, {}),
        (FUSED, {"add_bias_linear": True}),
        (FUSED, {"activation_func": F.gelu}),
        (FUSED, EXPERTS),
        (FUSED, SHARED),
        (OVERLAPPED, SHARED),
        (OVERLAPPED, {**SHARED, "activation_func_clamp_value": None, "glu_linear_offset": 1.0}),
        (TE, {}),
        (TE, {"activation_func_clamp_value": None, "glu_linear_offset": 1.0}),
    ],
    ids=["dense", "biased", "gelu", "experts", "shared", "overlapped", "offset, overlapped", "te", "offset, te"],
)
def test_a_fast_path_that_ignores_them_is_the_plain_one(fast, options, recompute, caplog):
    options = {**options, **recompute}
    with applied(), caplog.at_level(logging.WARNING, "shim"):
        found = trained({**options, fast: True})
    assert same(found, trained(options))
    [said] = [text for text in caplog.messages if ID in text]  # once, however many layers there are
    assert f"{fast} is off" in said


def test_without_a_clamp_fast_paths_stay():
    """The config keeps its fields, and values are stock's to the bit."""
    options = {**SHARED, "activation_func_clamp_value": None, FUSED: True, OVERLAPPED: True}
    with applied():
        config, found = config_of(**options), trained(options)
    assert config.bias_activation_fusion and config.moe_shared_expert_overlap
    assert same(found, trained(options))


def test_fused_quick_gelu_clamps_by_itself_and_stays():
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    options = {**EXPERTS, "activation_func": quick_gelu, "glu_linear_offset": 1.0, FUSED: True}
    with applied():
        config, found = config_of(**options), trained(options)
    assert config.bias_activation_fusion and same(found, trained(options))
    torch.testing.assert_close(found, trained({**options, FUSED: False}), rtol=1e-4, atol=1e-6)


def test_a_config_without_a_gate_keeps_its_fields():
    options = {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True, FUSED: True}
    with applied():
        assert config_of(**options).bias_activation_fusion


def test_a_field_that_is_switched_on_later_is_reported():
    with applied():
        model = testing.build_gpt(**MODEL)
        assert shim.check(model)[ID].state == "applied"
        model.config.bias_activation_fusion = True
        with pytest.raises(NotMetError, match="inactive: bias_activation_fusion of a layer's config is on"):
            shim.check(model)
