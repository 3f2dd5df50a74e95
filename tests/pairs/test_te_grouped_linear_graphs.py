"""te-grouped-linear-graphs: a graph serves every microbatch of a step, and outside of captures nothing changes."""

import pytest
import torch
import transformer_engine.pytorch as te
from needed import needed

import shim
from shim.patches.transformer_engine.te_grouped_linear_graphs.proof import (
    EXPERTS,
    MICROBATCHES,
    SIZE,
    TOKENS,
    Graph,
    experts,
    fill,
    forward,
    kernels_of,
    new_flag,
    round_to_e4m3,
    trained,
)

CELLS = {"0.17.1+2.14.1": "all"}

ID = "te-grouped-linear-graphs"
pytestmark = needed(ID)
RIGHT = (2.0 * SIZE, float(MICROBATCHES * TOKENS))  # an output and a gradient by weights of two


@pytest.fixture
def patched():
    with shim.patched(only=[ID], require=[ID]):
        yield


def captured(layer, graph, first, run=forward):
    """The output of a graph, in whose memory replays write."""
    with graph.capture():
        output = run(layer, first)
        output.sum().backward()
    return output.detach()


def flags(graph):
    """Of each quantization in the graph."""
    return [args[2] for kernel, args in graph.calls if kernel is round_to_e4m3]


@pytest.mark.parametrize("first", [True, False, None])
def test_a_graph_serves_a_step_however_it_was_captured(patched, first):
    assert trained(first) == RIGHT


def test_stock_is_wrong_for_either_microbatch_and_right_without_caching():
    assert trained(True) == (RIGHT[0], TOKENS)
    assert trained(False) == (SIZE, RIGHT[1])
    assert trained(None) == RIGHT


@pytest.mark.parametrize("first", [True, False])
def test_weights_are_quantized_once_in_a_step(patched, first):
    """Those of later microbatches cost a look at the flag."""
    graph = Graph()
    with kernels_of(graph):
        layer = experts()
        forward(layer, True).sum().backward()
        flag = new_flag()
        output = captured(layer, graph, first)
        assert [each is flag for each in flags(graph)] == [False] * EXPERTS + [True] * EXPERTS + [False] * EXPERTS
        for value, skipped in ((2.0, False), (3.0, True)):
            fill(layer, value)
            flag.fill_(skipped)
            graph.replay()
            assert output.unique().tolist() == [2.0 * SIZE]


def test_without_caching_nothing_changes():
    def kernels():
        graph = Graph()
        with kernels_of(graph):
            layer, _ = experts(), new_flag()
            captured(layer, graph, None)
            return [kernel for kernel, _ in graph.calls], flags(graph), layer._fp8_workspaces

    stock = kernels()
    with shim.patched(only=[ID], require=[ID]):
        assert kernels() == stock
    assert stock[2] == {} and set(stock[1]) == {None}


@pytest.mark.parametrize("first", [True, False, None])
def test_outside_of_a_capture_nothing_changes(first):
    """A flag is there, from a graph that was captured before."""

    def eager():
        graph = Graph()
        with kernels_of(graph):
            layer, _ = experts(), new_flag()
            found = []
            for value in (1.0, 2.0):
                graph.capturing = True  # writes down, though the stream does not capture
                fill(layer, value)
                output = forward(layer, first)
                output.sum().backward()
                found.append((output.tolist(), [parameter.main_grad.tolist() for parameter in layer.parameters()]))
            return found, [kernel for kernel, _ in graph.calls], flags(graph)

    stock = eager()
    with shim.patched(only=[ID], require=[ID]):
        assert eager() == stock
    assert set(stock[2]) == {None}


def test_a_capture_without_a_flag_stays_as_it_is():
    """As in a run without FP8."""

    def kernels():
        graph = Graph()
        with kernels_of(graph):
            captured(experts(), graph, True)
        return [kernel for kernel, _ in graph.calls], flags(graph)

    stock = kernels()
    with shim.patched(only=[ID], require=[ID]):
        assert kernels() == stock
    assert set(stock[1]) == {None}


def test_a_flag_that_a_module_passes_itself_is_kept(patched):
    own, seen = torch.ones(1), []
    graph = Graph()
    with kernels_of(graph):
        layer = experts()
        forward(layer, True)
        new_flag()
        workspace = layer._fp8_workspaces["weight0"]
        weights = {"tensor": layer.weight0, "quantizer": workspace._quantizer, "update_workspace": True}
        with graph.capture():
            if hasattr(layer, "get_weight_workspace"):
                layer.get_weight_workspace(cache_name="weight0", skip_update_flag=own, **weights)
            else:
                from transformer_engine.pytorch.module.base import quantize_weight

                quantize_weight(workspace=workspace, skip_update_flag=own, cache=True, **weights)
        seen = flags(graph)
    assert len(seen) == 1 and seen[0] is own


def test_it_holds_under_recompute(patched):
    def recomputed(layer, first):
        return torch.utils.checkpoint.checkpoint(forward, layer, first, use_reentrant=False)

    graph = Graph()
    with kernels_of(graph):
        layer = experts()
        forward(layer, True).sum().backward()
        new_flag()
        output = captured(layer, graph, True, recomputed)
        fill(layer, 2.0)
        for _ in range(MICROBATCHES):
            graph.replay()
    assert (float(output[0, 0]), float(layer.weight0.main_grad[0, 0])) == RIGHT


def test_an_error_leaves_nothing_behind(patched):
    graph = Graph()
    with kernels_of(graph):
        layer, _ = experts(), new_flag()
        with pytest.raises((AssertionError, ValueError)), graph.capture():
            layer(torch.ones(1, SIZE).requires_grad_(), [1], is_first_microbatch=True)  # one split for two experts
        assert trained(True) == RIGHT


def test_the_grouped_layer_of_megatron_core_calls_the_patched_method():
    extensions = pytest.importorskip("megatron.core.extensions.transformer_engine")
    assert issubclass(extensions.TEGroupedLinear, te.GroupedLinear)
    assert "super" in extensions.TEGroupedLinear.forward.__code__.co_names
