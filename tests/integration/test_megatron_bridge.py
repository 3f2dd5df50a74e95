"""Megatron-Bridge's own LoRA around the output layer, which verl, NeMo-RL and SkyRL use, under fused-linear-logprob.

Its classes are real, and so are megatron-core's and Transformer Engine's. Nothing of them needs a kernel here.
"""

from functools import cache

import pytest
import trainers

# A release of Megatron-Bridge, with releases of its time.
TRIPLES = {
    "0.3.1": ("0.16.1", "2.12.0"),
    "0.4.2": ("0.17.1", "2.14.1"),
    "0.5.1": ("0.18.2", "2.16.1"),
    "0.6.0": ("0.19.2", "2.20.2"),
}
CLASSES = ["megatron.bridge.peft.lora_layers", "megatron.bridge.peft.utils"]


@cache
def story(release, where):
    core, te = TRIPLES[release]
    given = {"trainers": [f"megatron-bridge=={release}"], "core": core, "te": te}
    if where == "one rank":
        return [trainers.run("megatron_bridge_story:tell", where, **given)]
    return trainers.run_ranks("megatron_bridge_story:tell", [(where,), (where,)], **given)


@pytest.mark.parametrize("release", TRIPLES)
@pytest.mark.parametrize("where", ["one rank", "TP", "SP"])
def test_losses_and_gradients_are_those_of_stock_and_no_logits_are_made(release, where):
    """With the base frozen and trained, and with dropout, for the main loss and one depth of multi-token prediction."""
    for told in story(release, where):
        assert set(told) == {"frozen", "trained", "dropout"}
        for name, case in told.items():
            assert case["classes"] == CLASSES
            assert case["state"] == "applied", (name, case)
            assert case["logits"] == [4, 0], (name, case)
            assert case["off"] < 3e-6, (name, case)
