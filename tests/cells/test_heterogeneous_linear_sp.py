"""heterogeneous-linear-sp: a linear layer is that of one rank, and stays without sequence parallelism."""

import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.heterogeneous_linear_sp.proof import TOKENS, WIDTH, linear, off_by
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "heterogeneous-linear-sp"
pytestmark = needed(ID)


def on(layout, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), shim.patched(only=[ID], require=[ID]):
        return function(*args)


def test_without_sequence_parallelism_it_is_that_of_one_rank(ranks2):
    assert max(ranks2.run(on, Layout(tp=2), off_by, False)) < 1e-6


def computed_again():
    """Output, and whether full recompute gives its gradients, bit for bit."""
    layer, _ = linear(sequence_parallel=True)
    gradients = []
    for checkpointed in (False, True):
        states = torch.ones(TOKENS // 2, 1, WIDTH, requires_grad=True)
        if checkpointed:
            output = torch.utils.checkpoint.checkpoint(lambda given: layer(given)[0], states, use_reentrant=False)
        else:
            output, _ = layer(states)
        output.sum().backward()
        gradients.append(states.grad)
    return tuple(output.shape), torch.equal(*gradients)


def test_a_rank_gets_its_tokens_also_if_they_are_computed_again(ranks2):
    layout = Layout(tp=2, sequence_parallel=True)
    assert ranks2.run(on, layout, computed_again) == [((TOKENS // 2, 1, WIDTH), True)] * 2
