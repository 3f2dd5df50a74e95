"""recompute-frees-inputs: memory is freed where nobody else has it, and no gradient changes."""

import contextlib

import pytest
import torch
from megatron.core import tensor_parallel
from mtp_recompute_cases import PACKED, VERSION, build, row_of, train
from norm_that_keeps_its_output import KeepsItsOutput
from recompute_cases import METHODS, equal_bits

import shim
from shim import testing
from shim.patches.megatron_core.recompute_frees_inputs.proof import UNIFORM, states_held, step

CELLS = {"0.16.1": "all"}

ID, RECOMPUTE = "recompute-frees-inputs", "mtp-recompute"
pytestmark = pytest.mark.usefixtures("one_rank")


def patched(*ids, release=True):
    return shim.patched(only=[ID, *ids], require=[ID, *ids], options={ID: {"release": release}})


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_adapters_are_trained_with_the_same_bits():
    """Frozen weights: the proof compares every gradient with those without recompute."""
    with patched():
        assert states_held(adapters=True) < 0.2


@pytest.mark.parametrize("experts", [4, None], ids=["experts", "dense"])
def test_no_more_memory_than_stock_at_any_time(experts):
    """Counted bytes. Stock keeps no graph of a dense layer, so there is nothing to gain."""
    held, peak, right = step(**UNIFORM, num_moe_experts=experts)
    with patched():
        found = step(**UNIFORM, num_moe_experts=experts)
    assert found[0] <= held and found[1] <= peak
    assert (found[0] < held) is (experts is not None)
    assert all(torch.equal(found[2][name], right[name]) for name in right)


def test_the_option_is_off_by_default():
    """Then nothing differs from stock, and check() says what switches it on."""
    stock = step(**UNIFORM)
    with shim.patched(only=[ID]):
        assert step(**UNIFORM)[:2] == stock[:2]
        found = shim.check(testing.build_gpt(mtp_num_layers=None))[ID]
        assert (found.state, found.reason) == ("inactive", "the option release is off")
    with patched():
        assert shim.check(testing.build_gpt(mtp_num_layers=None))[ID].state == "applied"


@pytest.mark.skipif(VERSION < (0, 14), reason="no _checkpointed_forward before 0.14")
@pytest.mark.parametrize("method", METHODS)
def test_layers_of_multi_token_prediction_may_share_an_input(method):
    """With each other, and with a norm that saved it for its own backward."""
    results = []
    for chosen, ids in ((None, []), (method, [ID])):
        with shim.patched(
            only=[RECOMPUTE, PACKED, *ids], require=[PACKED], options={ID: {"release": True}} if ids else None
        ):
            model = build(chosen)
            model.decoder.final_layernorm = Norm()
            results.append(train(model, row_of("padded")))
    assert equal_bits(*results)


class Norm(torch.nn.Module):
    def forward(self, hidden):
        return KeepsItsOutput.apply(hidden)


def test_whoever_has_the_input_keeps_it():
    """A detached view from outside, the input itself, and what a hook keeps of the recompute."""
    outside, seen = leaf(4, 3), []
    given = outside * 2
    view, values = given.detach()[1:], given.detach().clone()

    def layer(states):
        seen.append(states)
        return states.sin()

    with patched():
        tensor_parallel.checkpoint(layer, False, given).sum().backward()
    assert torch.equal(view, values[1:]) and torch.equal(given, values)
    assert torch.equal(seen[1], values)
    assert torch.equal(outside.grad, 2 * values.cos())


def test_what_is_kept_of_the_graph_holds_no_input():
    """Without the patch it holds the input and the gradient of it."""
    for context, kept in ((contextlib.nullcontext(), True), (patched(), False)):
        outside, seen = leaf(1024), []
        with context, testing.Footprint() as footprint:
            tensor_parallel.checkpoint(
                lambda states: seen.append(states.sum()) or states.sin(), False, outside * 2
            ).sum().backward()
            outside.grad = None
            assert (footprint.held_bytes >= 2 * 4096) is kept


def test_a_frozen_input_stays():
    frozen, trained = leaf(3).detach(), leaf(3)
    with patched():
        tensor_parallel.checkpoint(lambda a, b: a * b, False, frozen, trained).sum().backward()
    assert torch.equal(trained.grad, frozen)
    assert frozen.untyped_storage().size() and frozen.grad is None


def test_backward_may_run_again():
    """Each time from inputs of its own."""
    given = leaf(3)
    with patched():
        loss = tensor_parallel.checkpoint(torch.sin, False, given).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(given.grad, 2 * given.detach().cos())


def test_an_error_in_the_recompute_leaves_the_context_as_it_was():
    """Its function, which trainers look at, and the inputs."""
    given = leaf(3)

    def fails(states):
        if torch.is_grad_enabled():
            raise KeyError("inside")
        return states * 2

    with patched():
        output = tensor_parallel.checkpoint(fails, False, given)
        node = output.grad_fn
        with pytest.raises(KeyError, match="inside"):
            output.sum().backward()
        assert node.run_function is fails
    assert given.untyped_storage().size()
