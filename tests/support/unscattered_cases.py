"""Rows and models for language models whose embedding does not scatter, and whether two results are the same."""

import torch

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LENGTHS = {"one": (16,), "packed": (5, 13, 3)}
MODELS = {
    "plain": {},
    "recompute": FULL,
    "positions": {"position_embedding_type": "learned_absolute"},
    "no copy": {"clone_scatter_output_in_embedding": False},
}
# Each model with one of the rows, and the plain one with both.
CASES = [("one", "plain"), ("packed", "plain"), ("packed", "recompute"), ("one", "positions"), ("packed", "no copy")]


def outcome(found):
    """What `testing.run_packed` gives: the losses, and last the gradients by name."""
    return [found.main, *found.mtp, found.grads]


def equal(found, right):
    *losses, grads = found
    *true_losses, true_grads = right
    assert grads and grads.keys() == true_grads.keys()
    return all(map(torch.equal, losses, true_losses)) and all(torch.equal(grads[n], true_grads[n]) for n in grads)
