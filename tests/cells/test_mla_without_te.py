"""mla-without-te: multi-latent attention of local modules is built and trains without Transformer Engine."""

import importlib
from unittest import mock

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.mla_without_te.proof import BATCH, HIDDEN, MLA, TOKENS, build

CELLS = {"0.16.0": "all"}

ID = "mla-without-te"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def gradients():
    torch.manual_seed(0)
    layer = build()
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    layer(hidden, None)[0].square().sum().backward()
    return {name: weight.grad for name, weight in layer.named_parameters()}


def module():
    return importlib.import_module(MLA)


def test_it_trains_as_where_stock_has_the_right_flag():
    with mock.patch.object(module(), "HAVE_TE", False):
        expected = gradients()
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_the_flag_of_other_modules_stays():
    """They have flags of their own, which decide about other things."""
    names = ("attention", "transformer_block")
    others = [importlib.import_module("megatron.core.transformer." + name) for name in names]
    before = [other.HAVE_TE for other in others]
    with shim.patched(only=[ID], require=[ID]):
        assert module().HAVE_TE is False
        assert [other.HAVE_TE for other in others] == before
    assert module().HAVE_TE is True


def test_with_transformer_engine_the_flag_stays():
    """Its layers are classes there; a stand-in, because its own need its compiled part."""
    with mock.patch.object(module(), "TELinear", torch.nn.Linear), shim.patched(only=[ID], require=[ID]):
        assert module().HAVE_TE is True
