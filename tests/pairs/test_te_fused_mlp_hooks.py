"""te-fused-mlp-hooks: which hooks of its parts a layer of fused operations runs, and when they are read."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import shim
from shim import testing
from shim.patches.megatron_core.te_fused_mlp_hooks.proof import CLASSES, layers

CELLS = {"0.16.1+2.12.0": "all", "0.19.2+2.20.2": ["test_hooks_that_take_keyword_arguments"]}

ID = "te-fused-mlp-hooks"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")


@pytest.fixture
def patched():
    with shim.patched(only=[ID], require=[ID]), testing.layout_initialised(testing.Layout()):
        yield


@pytest.fixture(params=CLASSES)
def layer(request, patched):
    found = {type(layer).__name__: layer for layer in layers()}
    if request.param not in found:
        pytest.skip("this release has no such layer")
    return found[request.param]


def fused_of(layer):
    fused = nn.Identity()
    layer._register_hooks_on_fused_impl(fused)
    return fused


@needed
def test_hooks_run_in_the_order_of_parts_with_their_part(layer):
    """Without those of the layer itself, which torch runs when the layer is called."""
    fused, ran = fused_of(layer), []
    fused(1)
    for part in (layer.second, layer.first, layer):
        part.register_forward_pre_hook(lambda part, args: ran.append(part))
    layer.first.register_forward_hook(lambda part, args, output: ran.append("behind"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fused(1)
        assert len(warned) == 2  # by upstream: what they find is not the part's
        fused(1)
        assert len(warned) == 2
    assert ran == [layer.first, layer.second, "behind"] * 2


@pytest.mark.skipif(shim.plan()[ID].variant != "v0_17", reason="upstream's function gives hooks no keyword arguments")
def test_hooks_that_take_keyword_arguments(layer):
    fused, ran = fused_of(layer), []
    layer.first.register_forward_pre_hook(lambda part, args, kwargs: ran.append(kwargs), with_kwargs=True)
    with pytest.warns(UserWarning, match="pre-forward hook"):
        fused(1)
    assert ran == [{}]


@needed
def test_a_hook_that_is_removed_is_not_run(layer):
    ran = []
    handle = layer.first.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.warns(UserWarning, match="pre-forward hook"):
        fused = fused_of(layer)
    fused(1)
    handle.remove()
    fused(1)
    assert ran == [1]


@needed
def test_nothing_is_read_anew_while_hooks_stay(layer):
    fused = fused_of(layer)
    with mock.patch.object(nn, "Module", side_effect=AssertionError("read")):
        fused(1)
        fused(1)


@needed
@pytest.mark.parametrize("later", [False, True])
def test_backward_hooks_are_refused_as_on_stock(layer, later):
    if later:
        fused = fused_of(layer)
        layer.first.register_full_backward_hook(lambda *_: None)
        run = fused
    else:
        layer.first.register_full_backward_hook(lambda *_: None)
        run = lambda _: fused_of(layer)  # noqa: E731
    with pytest.raises(RuntimeError, match="backward hook"):
        run(1)


@needed
def test_a_hook_that_changes_the_input_is_refused_as_on_stock(layer):
    fused = fused_of(layer)
    layer.first.register_forward_pre_hook(lambda *_: (2,))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="modifies input"):
        fused(1)


@needed
def test_hooks_of_the_recompute_are_those_of_the_moment(layer):
    fused, ran = fused_of(layer), []
    values = torch.ones(2, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(lambda given: fused(given) * 2, values, use_reentrant=True)
    layer.first.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.warns(UserWarning, match="pre-forward hook"):
        output.sum().backward()
    assert ran == [1]
