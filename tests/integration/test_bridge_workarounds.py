"""Megatron-Bridge's own workarounds beside the patches that do the same, in both orders."""

import os
from functools import cache

import pytest
import trainers

TRAINERS, CORE, TE = ["megatron-bridge==0.6.2"], "0.19.2", "2.20.2"
each_order = pytest.mark.parametrize("order", ["first", "late"])


@cache
def story(order):
    path = [trainers.libraries("commands.txt"), *trainers.directories(TRAINERS, CORE, TE)]
    path = os.pathsep.join(map(str, path))
    return trainers.run("bridge_workarounds_story:tell", order, trainers=TRAINERS, core=CORE, te=TE, PYTHONPATH=path)


def test_without_shim_only_loaded_weights_are_saved():
    """Of nine weights as many as differ from the truth after four steps. A resume cannot even be loaded."""
    told = story("stock")
    assert told["weights"] == {"alone": 9, "beside": 0}
    assert all(why.startswith("KeyError: ") for why in told["resume"].values())


@each_order
def test_beside_shim_loaded_weights_stay(order):
    assert story(order)["weights"] == {"alone": 0, "beside": 0}
    assert story(order)["states"]["cpu-offloaded-optimizer"] == "applied"


@each_order
def test_on_a_resume_it_puts_rounded_weights_over_loaded_ones(order):
    """So it has to go: its package calls it after every load."""
    assert story(order)["resume"] == {"alone": 0, "beside": 9}


@pytest.mark.parametrize("order", ["stock", "first", "late"])
def test_its_factor_of_yarn_is_right(order):
    """It takes the place of shim's function, which does the same."""
    assert story(order)["YaRN"] == pytest.approx([1.0, 1.1386294])
    assert order == "stock" or story(order)["states"]["yarn-none-fields"] == "unknown"
