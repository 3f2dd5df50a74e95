"""dsa-indexer-gradient: no message more than stock's, and stock's bits without sequence parallelism."""

import torch
from all_reduces import sizes_of_all_reduces
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.dsa_indexer_gradient.proof import trained

CELLS = {"0.16.1": "all"}

ID = "dsa-indexer-gradient"
pytestmark = needed(ID)


def stock(sequence_parallel):
    layout = testing.Layout(tp=2, sequence_parallel=sequence_parallel)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return trained(sequence_parallel)


def with_patch(sequence_parallel):
    with shim.patched(only=[ID], require=[ID]):
        return stock(sequence_parallel)


def sizes(of, sequence_parallel):
    """Of the tensors that this rank reduces."""
    with sizes_of_all_reduces() as found:
        of(sequence_parallel)
    return found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def test_copies_of_a_weight_stay_equal(ranks2):
    """Nobody adds or compares their gradients, as without sequence parallelism on stock."""
    first, second = ranks2.run(with_patch, True)
    assert same(first, second)


def test_without_sequence_parallelism_it_is_as_on_stock(ranks2):
    pairs = zip(ranks2.run(with_patch, False), ranks2.run(stock, False), strict=True)
    assert all(same(found, right) for found, right in pairs)


def test_no_more_is_reduced(ranks2):
    found, right = (ranks2.run(sizes, of, True)[0] for of in (with_patch, stock))
    assert len(found) <= len(right)
    assert sum(found) < sum(right)
