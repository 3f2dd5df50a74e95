"""Megatron-Bridge's own training step: a packed row trains like its sequences alone, with shim first or late.

Its provider, initialization, batches, forward step, loss and optimizer are real, and so are megatron-core's schedule
and Transformer Engine's layers, whose kernels are torch's. It gives the model no loss mask.
"""

from functools import cache

import pytest
import trainers

# Releases whose step can be imported without megatron.training, with releases of their time.
TRIPLES = {"0.3.1": ("0.16.1", "2.12.0"), "0.4.2": ("0.17.1", "2.14.1")}


@cache
def story(release, order):
    core, te = TRIPLES[release]
    told = trainers.run(
        "megatron_bridge_step_story:tell", order, trainers=[f"megatron-bridge=={release}"], core=core, te=te
    )
    return told["state"], max(told["losses"]), told["weights"]


@pytest.mark.parametrize("order", ["first", "late"])
@pytest.mark.parametrize("release", TRIPLES)
def test_a_packed_row_trains_like_its_sequences_alone(release, order):
    state, losses, weights = story(release, order)
    assert state == "applied" and losses < 1e-6 and weights < 1e-6


@pytest.mark.parametrize("release", TRIPLES)
def test_on_stock_it_does_not(release):
    state, losses, weights = story(release, "stock")
    assert state == "excluded" and losses > 1e-4 and weights > 1e-3
