"""A storage gets other values without an operation that autograd sees."""

import torch

from shim.ops._storage import copy_storage


def test_a_freed_storage_has_the_values_again_also_for_views_and_for_autograd():
    """As an output that was saved for backward, freed, and recomputed."""
    weight = torch.randn(4, 3, requires_grad=True)
    output = weight.detach() * 2
    right, view = output.clone(), output[1:]
    loss = (weight * output).sum()
    output.untyped_storage().resize_(0)
    version = output._version
    copy_storage(output, right)
    assert torch.equal(output, right) and torch.equal(view, right[1:]) and output._version == version
    loss.backward()
    assert torch.equal(weight.grad, right)


def test_both_keep_their_own_memory():
    target, source = torch.zeros(3), torch.ones(3)
    copy_storage(target, source)
    source.fill_(2)
    assert torch.equal(target, torch.ones(3))
