"""affine-projector-bias: what stock does right keeps its bits."""

import contextlib

import torch

import shim
from shim import testing
from shim.patches.megatron_core.affine_projector_bias.proof import step
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "affine-projector-bias"


def stepped(layout, bias, active):
    how = shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), how:
        return step(bias)


def test_one_rank_has_stocks_bits():
    for found, expected in zip(*(stepped(Layout(), True, active) for active in (True, False)), strict=True):
        assert torch.equal(found, expected)


def test_a_projection_without_a_bias_has_stocks_bits(ranks2):
    patched, stock = (ranks2.run(stepped, Layout(tp=2), False, active) for active in (True, False))
    for of_rank, expected in zip(patched, stock, strict=True):
        assert all(map(torch.equal, of_rank, expected))
