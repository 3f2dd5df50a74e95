"""Microbatches of several rows that end in padding, with shim: a step is the sum of the steps of each row alone."""

import pytest
import torch
from drawn_steps import EXPERTS, MLA, STACKS, VERSION
from whole_steps import here

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ROWS = ((8, 3, 1), (5, 5))
# Sums over tokens, of which each row has its own.
LOSSES = EXPERTS | {"calculate_per_token_loss": True, "moe_token_dispatcher_type": "alltoall", "moe_z_loss_coeff": 0.01}
LOSSES |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.05}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
# On stock rows weigh by their mean length, and an expert bias raises beside a mask. Multi-token prediction is not here:
# its last token is padding if padding follows, and counts in a row alone.
CASES = {
    "sequences": ("moe", {}),
    "latent, expert bias, shared expert": ("mla moe", MLA | BIAS | {"moe_shared_expert_intermediate_size": 32}),
    "hybrid": ("hybrid moe", {}),
}


def built(kind, options):
    options = LOSSES | {"params_dtype": torch.float64} | options
    if kind in STACKS:
        return testing.build_hybrid(STACKS[kind], **options).double()
    return testing.build_gpt(**{"mtp_num_layers": None, "num_layers": 2, **options}).double()


def add_step(model, lengths):
    """Adds gradients of one microbatch whose rows have so many tokens, and as much padding as the longest needs."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(length))
    places = torch.arange(longest).expand_as(ids)
    real = places < torch.tensor(lengths)[:, None]
    given = {"padding_mask": ~real} if len(lengths) > 1 else {}
    losses = model(ids, places, None, labels=(7 * ids + 1) % 64, loss_mask=real.double(), **given)
    (losses * real).sum().backward()


@pytest.mark.skipif(VERSION < (0, 16), reason="models of this release take no padding mask")
@pytest.mark.parametrize("case", CASES)
def test_a_microbatch_is_the_sum_of_its_rows(case):
    kind, options = CASES[case]
    if kind in STACKS and VERSION < (0, 17):
        pytest.skip("hybrid models of this release take no loss mask")
    found = []  # the whole gradient, of both ways
    with here(Layout(), kind), shim.patched():
        for microbatches in (ROWS, [(length,) for lengths in ROWS for length in lengths]):
            model = built(kind, options)
            for lengths in microbatches:
                add_step(model, lengths)
            found.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert (found[0] - found[1]).norm() < 5e-6 * found[1].norm()
