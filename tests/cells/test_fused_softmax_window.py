"""fused-softmax-window: a layer with a window takes the path that has one, and the others keep their kernel."""

import contextlib
from unittest import mock

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.fused_softmax_window import proof
from shim.patches.megatron_core.fused_softmax_window.proof import attended

CELLS = {"0.15.0": "all"}

ID = "fused-softmax-window"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


def applied():
    return shim.patched(only=[ID], require=[ID])


@pytest.mark.parametrize("window", [(3, 0), (0, 0), (15, 0)])
def test_with_a_window_it_is_the_path_of_torch(window):
    with applied():
        assert torch.equal(attended(True, window), attended(False, window))


@pytest.mark.parametrize("options", [{}, {"layer": 2, "window_attn_skip_freq": 2}], ids=["no window", "left out"])
def test_without_one_the_kernel_stays(options):
    """Also in a layer that has none because window_attn_skip_freq leaves it out."""
    window = (3, 0) if options else None
    with applied(), kernels_counted() as calls:
        found = attended(True, window, **options)
    assert len(calls) == 1 and torch.equal(found, attended(True, window, **options))


@contextlib.contextmanager
def kernels_counted():
    """The shapes for which the causal kernel is called."""
    calls, kernel = [], proof.KERNELS["scaled_upper_triang_masked_softmax_cuda"]

    def counted(scores, scale):
        calls.append(scores.shape)
        return proof.causal_kernel(scores, scale)

    with mock.patch.object(kernel, "forward", counted):
        yield calls
