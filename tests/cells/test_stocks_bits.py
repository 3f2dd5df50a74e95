"""A run that meets no defect has stock's bits: weights and gradients after three steps, under all default patches."""

from dataclasses import replace

import pytest
import torch

import shim
from shim import testing
from shim.testing.trainings import TRAININGS, trained

CELLS = {
    "0.14.0": "all",
    "0.16.1": "first",
    "0.17.1": "first",
    "0.18.2": "first",
    "0.19.2": "all",
}
ABOUT = []

HALF = {"bf16": True, "params_dtype": torch.bfloat16}
# Those of TRAININGS whose numbers stock has right on every release that can do them at all.
RIGHT = ["dense", "experts", "TP 2, distributed optimizer", "EP 2", "packed", "recompute", "multi-token prediction"]
CASES = {
    **{name: TRAININGS[name] for name in RIGHT},
    "TP 2, SP": replace(TRAININGS["TP 2, SP"], options={}),
    "dense in bf16": replace(TRAININGS["dense"], optimizer="distributed", options=HALF),
    "TP 2 in bf16": replace(TRAININGS["TP 2, distributed optimizer"], options=HALF),
    "swiglu, qk norm": replace(
        TRAININGS["dense"],
        options={"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "qk_layernorm": True},
    ),
}


@pytest.fixture(scope="module")
def ranks():
    """Pools by the number of ranks."""
    with testing.Ranks(1) as one, testing.Ranks(2) as two:
        yield {1: one, 2: two}


def differing(name, arguments):
    """What differs on this rank between stock and the patches, by name; the error's text if stock cannot do it."""
    try:
        stock = trained(CASES[name])
    except Exception as error:  # what stock cannot do has no bits
        return f"stock: {type(error).__name__}: {error!s:.200}"
    with shim.patched(**arguments):
        found = trained(CASES[name])
    assert stock.keys() == found.keys() and any(value.any() for value in stock.values())
    return [key for key in stock if not torch.equal(stock[key], found[key])]


@pytest.mark.parametrize("name", CASES)
def test_all_patches_leave_stocks_bits(name, ranks):
    for said in ranks[CASES[name].layout.world].run(differing, name, {}):
        if isinstance(said, str):
            pytest.skip(said)
        assert said == []


@pytest.mark.once
def test_the_comparison_sees_a_change_of_rounding(ranks):
    """With rounding=True the losses of chunked-logprob are as exact, and round in another order."""
    (said,) = ranks[1].run(differing, "dense", {"rounding": True})
    assert said
