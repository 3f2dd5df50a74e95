"""mamba-norm-eps: other norms, the default epsilon, and layers that were built before."""

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from needed import needed

import shim
from shim.patches.megatron_core.mamba_norm_eps.proof import EPSILON, WIDTH, build, output_and_gradient

CELLS = {"0.13.1": "all"}

ID = "mamba-norm-eps"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def with_patch(*args, **given):
    with shim.patched(only=[ID], require=[ID]):
        return build(*args, **given)


def test_the_default_epsilon_gives_the_same_bits():
    hidden = 1e-3 * torch.randn(4, 1, WIDTH)
    found, stock = (output_and_gradient(make(epsilon=1e-5), hidden) for make in (with_patch, build))
    assert torch.equal(found, stock)


def test_a_layer_whose_norm_is_in_its_mixer_stays():
    """As in upstream's specs for Transformer Engine."""
    layer = with_patch(IdentityOp)
    assert isinstance(layer.norm, IdentityOp) and not hasattr(layer.norm, "eps")


def test_check_names_a_layer_that_was_built_before():
    before = build()
    with shim.patched(only=[ID]):
        report = shim.check(torch.nn.Sequential(before))[ID]
        assert report.state == "inactive"
        assert f"has the epsilon 1e-05, and its config says {EPSILON}" in report.reason
        assert shim.check(torch.nn.Sequential(build()))[ID].state == "applied"
