"""one-rank-mappings: over one rank a mapping gives its input back, and over two it does what it did."""

import warnings

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers, mappings

import shim
from shim import testing
from shim.patches.megatron_core.one_rank_mappings.proof import EXPERTS, distance, trained
from shim.testing import Layout

CELLS = {"0.17.1": "all"}

ID = "one-rank-mappings"
pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch")
BIASES = testing.release() >= "0.15"
TAKES_GROUP = testing.release() >= "0.13"
NAMES = ["gather_from_tensor_model_parallel_region"]
if BIASES:
    NAMES += ["reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"]
MODEL = EXPERTS if BIASES else {}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GATHERED = {"runtime_gather_output": True}


@pytest.fixture(autouse=True)
def one_rank(request):
    """No rank can be forked inside a layout."""
    if "ranks2" in request.fixturenames:
        yield
        return
    with testing.layout_initialised(Layout()):
        yield


def patched():
    return shim.patched(only=[ID], require=[ID])


def product():
    """Something with a gradient that is no leaf, [4, 6]."""
    return torch.arange(24.0).reshape(4, 6).requires_grad_() * 2


@pytest.mark.parametrize("name", NAMES)
def test_what_one_rank_gets_may_be_written_to(name):
    with pytest.raises(RuntimeError, match="is a view"):
        getattr(mappings, name)(product()).add_(1)
    with patched():
        given = product()
        assert getattr(mappings, name)(given) is given
        getattr(layers, name)(given).add_(1).sum().backward()


@pytest.mark.skipif(not TAKES_GROUP, reason="0.12 takes no group here")
@pytest.mark.parametrize("passed", ["by name", "by position", "not at all"])
def test_a_group_is_taken_as_it_is_passed(passed):
    group = parallel_state.get_tensor_model_parallel_group()
    args, kwargs = {
        "by name": ((), {"group": group}),
        "by position": ((group,), {}),
        "not at all": ((), {}),
    }[passed]
    with patched(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        given = product()
        assert mappings.gather_from_tensor_model_parallel_region(given, *args, **kwargs) is given
    assert sum("tp_group is None" in str(warning.message) for warning in told) == (passed == "not at all")


@pytest.mark.skipif(not TAKES_GROUP, reason="0.12 takes no group here")
def test_without_a_group_stock_raises(monkeypatch):
    """As if no layout were initialised."""
    monkeypatch.setattr(mappings, "get_tensor_model_parallel_group_if_none", lambda group: None)
    for patches in ([], [ID]):
        with shim.patched(only=patches), pytest.raises((AssertionError, AttributeError)) as raised:
            mappings.gather_from_tensor_model_parallel_region(product())
        assert raised.traceback[-1].path.name == "mappings.py"


@pytest.mark.parametrize("call", [None, GATHERED], ids=["plain", "gathered"])
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["", "recompute"])
def test_a_step_is_to_the_bit_that_without_views(call, recompute):
    right = trained(copies=True, **MODEL)
    with patched():
        found = trained(call, **MODEL, **recompute)
    assert distance(found, right) == 0


def test_what_stock_does_right_stays():
    """A dense model whose logits nobody gathers has the same losses and gradients to the bit."""
    right = trained(add_bias_linear=True)
    with patched():
        assert distance(trained(add_bias_linear=True), right) == 0


def test_beside_all_other_patches():
    with patched():
        right = trained(GATHERED, **MODEL)
    with shim.patched():
        assert distance(trained(GATHERED, **MODEL), right) < 1e-6


def test_in_bf16_gathered_logits_are_those_of_stock():
    options = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    right = trained(GATHERED, **options)
    with patched():
        assert distance(trained(GATHERED, **options), right) == 0


def test_torch_compile_takes_it_as_one_graph():
    group = (parallel_state.get_tensor_model_parallel_group(),) if TAKES_GROUP else ()

    def twice(given):
        return mappings.gather_from_tensor_model_parallel_region(given, *group) * 2

    torch._dynamo.reset()
    given = torch.ones(3, requires_grad=True)
    with patched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(twice, backend="eager", fullgraph=True)(given).sum().backward()
    assert given.grad.tolist() == [2.0] * 3


def over_two_ranks():
    """On this rank: by name, whether the patch gives what stock does, forward and backward."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)):
        rank, found = parallel_state.get_tensor_model_parallel_rank(), {}
        for name in NAMES:
            results = []
            for patches in ([], [ID]):
                with shim.patched(only=patches, require=patches):
                    leaf = (torch.arange(24.0).reshape(4, 6) + rank).requires_grad_()
                    out = getattr(mappings, name)(leaf * 1)
                    (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
                    results.append((out.detach(), leaf.grad))
            found[name] = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        return found


def test_two_ranks_get_what_they_got(ranks2):
    assert ranks2.run(over_two_ranks) == [dict.fromkeys(NAMES, True)] * 2


def under_sequence_parallelism():
    """On this rank, with tensor parallelism for all but the experts: whether a step is that without views."""
    layout = Layout(tp=2, sequence_parallel=True, etp=1)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        options = {**EXPERTS, "sequence_parallel": True, "moe_token_dispatcher_type": "alltoall"}
        right = trained(copies=True, **options)
        with patched():
            return distance(trained(**options), right) == 0


@pytest.mark.skipif(not BIASES, reason="before 0.15 experts have no biases")
def test_experts_of_one_rank_under_sequence_parallelism(ranks2):
    assert ranks2.run(under_sequence_parallelism) == [True, True]
