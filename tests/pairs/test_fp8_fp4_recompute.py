"""Patch fp8-fp4-recompute with Transformer Engine's contexts: a recompute is in the region of its forward pass."""

import contextlib
from importlib.metadata import version

import pytest
import torch
import transformer_engine.pytorch as te
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CheckpointFunction, CheckpointWithoutOutput
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.distributed import checkpoint as te_checkpoint

import shim
from shim import testing
from shim.patches.megatron_core.mtp_recompute.proof import OneSequence
from shim.testing import Fp8Event, Layout

CELLS = {"0.12.0+2.3.0": "all", "0.19.2+2.20.2": ["test_decoder_layers_are_recomputed_in_fp4"]}

ID, TE_ID = "fp8-fp4-recompute", "te-fp8-state"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
TE = tuple(int(part) for part in version("transformer_engine").split(".")[:2])
NAMES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling")
RECIPES = [name for name in NAMES if hasattr(recipes, name)]
# (enabled, calibrating); neither is no region at all.
MODES = [(True, False), (True, True), (False, True)]
OFF = (False, False)
# (recompute_enabled, recompute_phase) in the forward pass of a tracked region, and in its recompute.
FORWARD, RECOMPUTE = (True, False), (True, True)
# From 2.19 TE's checkpoint tracks regions that are opened inside it; earlier it looks before its own region is entered.
TE_RECOMPUTE = RECOMPUTE if TE >= (2, 19) else (False, True)
GROUP = object()  # of amax reduction: with no TE module there is nothing to reduce, so nobody looks at it


@pytest.fixture
def applied():
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield report


@pytest.fixture(params=["stock", "patched"])
def patched(request):
    """Whether the patch is applied: behaviour with it beside that without."""
    with shim.patched(only=[ID], require=[ID]) if request.param == "patched" else contextlib.nullcontext():
        yield request.param == "patched"


@pytest.fixture(scope="module")
def one_rank():
    """For models, and for the generators that a checkpoint restores; once, because it takes longer than a test."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


def recipe_of(name):
    return getattr(recipes, name)()


@contextlib.contextmanager
def region(recipe, enabled=True, calibrating=False, group=None):
    if hasattr(te, "autocast"):  # from 2.9
        entered = te.autocast(enabled=enabled, calibrating=calibrating, recipe=recipe, amax_reduction_group=group)
    else:
        entered = te.fp8_autocast(enabled=enabled, calibrating=calibrating, fp8_recipe=recipe, fp8_group=group)
    # 2.3 to 2.8 have FP8 block scaling on Hopper only.
    with testing.te_cuda_stand_ins((9, 0)) if isinstance(recipe, block_scaling()) else contextlib.nullcontext():
        with entered:
            yield


def block_scaling():
    return getattr(recipes, "Float8BlockScaling", ())


def depth():
    """How many regions are open; entering one that is switched off reduces nothing."""
    with testing.record_fp8_events() as events, region(None, enabled=False):
        return events[0].depth - 1


def snapshot():
    return testing.fp8_state(), depth()


class Probe(torch.nn.Module):
    """A linear layer with dropout that writes down in which state it runs."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout(rate)
        self.seen = []

    def forward(self, values):
        self.seen.append((torch.is_grad_enabled(), testing.fp8_state()))
        return self.dropout(self.linear(values))

    @property
    def states(self):
        """Those of the forward pass and of the recompute; only the latter has gradients on."""
        assert [grad for grad, _ in self.seen] == [False, True]
        return [state for _, state in self.seen]


def values():
    return torch.randn(3, 4, requires_grad=True)


def regions_of(states):
    return [(state.enabled, state.calibrating) for state in states]


def flags_of(states):
    return [(state.recompute_enabled, state.recompute_phase) for state in states]


# tensor_parallel.checkpoint


@pytest.mark.parametrize("name", RECIPES)
def test_a_recompute_is_in_the_region_of_its_forward_pass(patched, name):
    for enabled, calibrating in MODES:
        assert_same_region(patched, recipe_of(name), enabled, calibrating)


def assert_same_region(patched, recipe, enabled, calibrating):
    probe = Probe()
    with testing.te_cuda_stand_ins((9, 0)) if isinstance(recipe, block_scaling()) else contextlib.nullcontext():
        with region(recipe, enabled, calibrating, GROUP):
            output = tensor_parallel.checkpoint(probe, False, values())
        output.sum().backward()
    forward, recompute = probe.states
    assert forward[:4] == (enabled, calibrating, recipe, GROUP) and forward.recipe is recipe
    if not patched:
        assert regions_of([recompute]) == [OFF] and recompute.recipe is not recipe
        assert flags_of(probe.states) == [OFF, OFF]
        return
    assert regions_of([recompute]) == [(enabled, calibrating)]
    assert recompute.recipe is recipe and recompute.group is GROUP
    assert flags_of(probe.states) == ([FORWARD, RECOMPUTE] if enabled else [OFF, OFF])
    assert regions_of([testing.fp8_state()]) == [OFF] and depth() == 0


@pytest.mark.parametrize("switched_off", [False, True])
def test_outside_of_any_region_nothing_changes(applied, switched_off):
    probe = Probe()
    with region(None, enabled=False) if switched_off else contextlib.nullcontext():
        with testing.record_fp8_events() as events:
            output = tensor_parallel.checkpoint(probe, False, values())
            assert output.grad_fn.run_function is probe
            output.sum().backward()
    assert events == []
    assert regions_of(probe.states) == flags_of(probe.states) == [OFF, OFF]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recompute_reduces_nothing(patched, name):
    """The forward region has reduced amax and moved the scales on; the region of the recompute must not once more."""
    recipe = recipe_of(name)
    with testing.te_cuda_stand_ins((9, 0)) if isinstance(recipe, block_scaling()) else contextlib.nullcontext():
        with testing.record_fp8_events() as events:
            with region(recipe):
                output = tensor_parallel.checkpoint(Probe(), False, values())
            assert [event.kind for event in events] == ["enter", "exit", "reduce"]
            forward = list(events)
            output.sum().backward()
    assert forward[0] == Fp8Event("enter", True, name, 1) and forward[1] == Fp8Event("exit", True, name, 0)
    assert forward[2].forward is True
    # Stock enters nothing.
    assert events[3:] == (forward[:2] if patched else [])


def test_a_recompute_inside_of_a_region_leaves_it_open(patched):
    """As with backward under autocast: the region of the recompute is one level deeper."""
    probe, first, second = Probe(), recipe_of("DelayedScaling"), recipe_of("DelayedScaling")
    with region(first):
        output = tensor_parallel.checkpoint(probe, False, values())
    with region(second):
        before = snapshot()
        with testing.record_fp8_events() as events:
            output.sum().backward()
        assert snapshot() == before and testing.fp8_state().recipe is second
    assert probe.states[1].recipe is (first if patched else second)
    assert [(event.kind, event.depth) for event in events] == ([("enter", 2), ("exit", 1)] if patched else [])


def own_backward(ctx, *grads):
    """What a trainer puts in the place of CheckpointFunction.backward, as verl does."""
    with random._fork_rng():
        random._set_all_rng_states(*ctx.rng_states)
        detached = random.detach_variable(ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.run_function(*detached)
    torch.autograd.backward((output,), grads)
    return (None, None, *(value.grad for value in detached))


@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
def test_gradients_are_the_same_also_with_a_replaced_backward(one_rank, monkeypatch, patch, when):
    """With dropout inside, so that random states are seen to be restored as well."""
    probe, plain = Probe(rate=0.5), values()
    checkpointed, state = plain.detach().clone().requires_grad_(), torch.get_rng_state()
    probe(plain).square().sum().backward()
    expected = [plain.grad, *(weight.grad.clone() for weight in probe.parameters())]
    probe.zero_grad(set_to_none=True)
    probe.seen.clear()
    torch.set_rng_state(state)

    if when == "before":
        monkeypatch.setattr(CheckpointFunction, "backward", staticmethod(own_backward))
    with shim.patched(only=[ID], require=[ID]) if patch else contextlib.nullcontext():
        if when == "after":
            monkeypatch.setattr(CheckpointFunction, "backward", staticmethod(own_backward))
        with region(recipe_of("DelayedScaling")):
            output = tensor_parallel.checkpoint(probe, False, checkpointed)
        torch.rand(5)  # backward finds another random state than the forward pass did
        output.square().sum().backward()
        monkeypatch.undo()
    assert regions_of(probe.states) == [(True, False), (True, False) if patch else OFF]
    found = [checkpointed.grad, *(weight.grad for weight in probe.parameters())]
    assert len(found) == 3 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "no-input-requires-grad"])
def test_nothing_is_kept_for_a_recompute_that_never_comes(applied, grad):
    """TE keeps what a recompute needs first in, first out: a leftover would be taken by the next one."""
    probe, given = Probe(), values().requires_grad_(not grad)
    with region(recipes.DelayedScaling()):
        with torch.set_grad_enabled(grad):
            output = tensor_parallel.checkpoint(probe, False, given)
        assert not activation_recompute_forward._is_first_fp8_module
    assert flags_of([probe.seen[0][1]]) == [OFF] and probe.seen[0][1].enabled
    assert not output.requires_grad and torch.equal(output, probe(given))


@pytest.mark.parametrize("failing", ["forward", "recompute"])
def test_an_exception_leaves_the_state_as_it_was(applied, failing):
    states = []

    def function(given):
        states.append(testing.fp8_state())
        if torch.is_grad_enabled() == (failing == "recompute"):
            raise ZeroDivisionError
        return given * 2

    outside = snapshot()
    with region(recipe_of("DelayedScaling")):
        inside = snapshot()
        with pytest.raises(ZeroDivisionError) if failing == "forward" else contextlib.nullcontext():
            output = tensor_parallel.checkpoint(function, False, values())
        assert snapshot() == inside
    assert snapshot() == outside
    if failing == "recompute":
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        assert snapshot() == outside
    # It was entered, or there had been nothing to leave.
    assert flags_of(states) == [FORWARD, RECOMPUTE][: len(states)] and len(states) == 1 + (failing == "recompute")


def test_inside_the_checkpoint_of_transformer_engine_its_flags_are_kept(patched):
    """The inner checkpoint neither sets nor clears the flags of the outer one; its own recompute is in the region."""
    inner, around = Probe(), []

    def outer(given):
        around.append(testing.fp8_state())
        output = tensor_parallel.checkpoint(inner, False, given * 1)
        around.append(testing.fp8_state())
        return output

    # What the outer recompute is in on TE 2.1 is another patch's part.
    with shim.patched(only=[ID, TE_ID] if patched else [TE_ID]):
        with region(recipe_of("DelayedScaling")):
            output = te_checkpoint(outer, values())
        output.sum().backward()
    assert flags_of(around) == [FORWARD, FORWARD, TE_RECOMPUTE, TE_RECOMPUTE]
    assert regions_of(around) == [(True, False)] * 4
    assert [grad for grad, _ in inner.seen] == [False, False, True]
    states = [state for _, state in inner.seen]
    assert flags_of(states) == [FORWARD, TE_RECOMPUTE, OFF]
    assert regions_of(states) == [(True, False), (True, False), (True, False) if patched else OFF]


# CheckpointWithoutOutput


def without_output(function, given):
    checkpoint = CheckpointWithoutOutput()
    output = checkpoint.checkpoint(function, given)
    result = output * 2
    checkpoint.discard_output_and_register_recompute(result)
    return checkpoint, result


@pytest.mark.parametrize("name", RECIPES)
def test_without_output_the_recompute_is_in_the_region(patched, name):
    probe, recipe, given = Probe(), recipe_of(name), values()
    with testing.te_cuda_stand_ins((9, 0)) if isinstance(recipe, block_scaling()) else contextlib.nullcontext():
        with region(recipe):
            checkpoint, result = without_output(probe, given)
        result.sum().backward()
    # Up to 0.12 there is no bookkeeping; later ones keep books also where the argument is False, on purpose.
    assert getattr(checkpoint, "fp8", None) is (True if VERSION > (0, 12) else None)
    right = patched or VERSION > (0, 12)
    assert regions_of(probe.states) == [(True, False), (True, False) if right else OFF]
    assert probe.states[0].recipe is recipe and (probe.states[1].recipe is recipe) == right
    assert flags_of(probe.states) == ([FORWARD, RECOMPUTE] if right else [OFF, OFF])
    gradient, given.grad = given.grad, None
    (probe(given) * 2).sum().backward()
    assert torch.equal(gradient, given.grad)


@pytest.mark.skipif(VERSION > (0, 15), reason="guarded upstream from 0.16")
def test_without_output_and_without_a_forward_pass_there_is_nothing_to_recompute():
    with pytest.raises(AttributeError):
        CheckpointWithoutOutput()._recompute(None)
    with shim.patched(only=[ID], require=[ID]):
        assert CheckpointWithoutOutput()._recompute(None) is None


# TransformerBlock


ROW = OneSequence(**vars(testing.pack(testing.random_sequences((9,)))))
QUANTIZED = {"delayed": "TEDelayedScaling", "tensorwise": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling"}
if TE < (2, 1):
    del QUANTIZED["mxfp8"]  # megatron-core wants 2.1 for it
if TE < (2, 2):
    del QUANTIZED["tensorwise"]  # megatron-core wants 2.2 for it
METHODS = [("uniform", 1), ("uniform", 2), ("block", 1), ("block", 2)]


def trained(config):
    """Losses and gradients of one step, and what every decoder layer saw: [(layer, gradients on, state)]."""
    model = testing.build_gpt(mtp_num_layers=None, **config)
    seen = []
    for number, layer in enumerate(model.decoder.layers):
        layer.mlp.register_forward_pre_hook(
            lambda *_, number=number: seen.append((number, torch.is_grad_enabled(), testing.fp8_state()))
        )
    return testing.run_packed(model, ROW), seen


def equal_bits(a, b):
    return (
        torch.equal(a.main, b.main)
        and a.grads.keys() == b.grads.keys()
        and all(torch.equal(a.grads[name], b.grads[name]) for name in a.grads)
    )


def full(method, layers):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_decoder_layers_are_recomputed_in_their_region(one_rank, patched, recipe):
    """0.12 needs the patch, but for delayed scaling; later releases are right by themselves, and stay so."""
    config = {"fp8": "hybrid", "fp8_recipe": recipe}
    with shim.patched(only=[ID, TE_ID] if patched else [TE_ID]):
        plain, _ = trained(config)
        for method, layers in METHODS:
            result, seen = trained({**config, **full(method, layers)})
            assert equal_bits(plain, result)
            assert_own_regions(seen, patched, recipe, method, layers)


def assert_own_regions(seen, patched, recipe, method, layers):
    # (layer, gradients on) in order; under FP8 block skips layers whose input has no gradient: there is none.
    passes = {
        ("uniform", 1): [(0, False), (1, False), (1, True), (0, True)],
        ("uniform", 2): [(0, False), (1, False), (0, True), (1, True)],
        ("block", 1): [(0, False), (1, True), (0, True)],
        ("block", 2): [(0, False), (1, False), (1, True), (0, True)],
    }[method, layers]
    assert [(number, grad) for number, grad, _ in seen] == passes
    right = patched or VERSION > (0, 12) or recipe == "delayed"
    kept_outside = method == "block" and layers == 1  # layer 1 is not recomputed
    for number, grad, state in seen:
        assert state.enabled == right
        assert not right or type(state.recipe).__name__ == QUANTIZED[recipe]
        if kept_outside and number == 1:
            expected = OFF
        elif TE >= (2, 19):
            expected = RECOMPUTE if grad else FORWARD
            if not right:
                expected = (False, grad)
        elif grad:
            expected = (False, True)
        else:
            # Looked up when the checkpoint begins: only delayed scaling has a region around it.
            expected = (recipe == "delayed", False)
        assert (state.recompute_enabled, state.recompute_phase) == expected, (number, grad)


@pytest.mark.skipif("mxfp8" not in QUANTIZED, reason="delayed scaling is around the whole block")
def test_first_and_last_layers_in_bf16_stay_so_in_a_recompute(one_rank, patched):
    config = {
        "fp8": "hybrid",
        "fp8_recipe": "mxfp8",
        "num_layers": 3,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 0,
    }
    with shim.patched(only=[ID, TE_ID] if patched else [TE_ID]):
        for method, layers in [("uniform", 1), ("uniform", 3), ("block", 2), ("block", 3)]:
            _, seen = trained({**config, **full(method, layers)})
            recomputed = set(range(layers if method == "block" else 3))
            assert {number for number, grad, _ in seen if not grad} == recomputed
            # 0.12 recomputes without any region; a layer that is not recomputed, the patch puts into its own as well.
            right = patched or VERSION > (0, 12)
            assert all(state.enabled == (right and number > 0) for number, _, state in seen)


@pytest.mark.skipif(VERSION < (0, 15) or TE < (2, 8), reason="FP4 came with 0.15 and Transformer Engine 2.8")
def test_decoder_layers_are_recomputed_in_fp4(one_rank, patched):
    result, seen = trained({"fp4": "e2m1", **full("uniform", 1)})
    assert [(n, grad) for n, grad, _ in seen] == [(0, False), (1, False), (1, True), (0, True)]
    assert all(state.enabled and type(state.recipe).__name__ == "NVFP4BlockScaling" for *_, state in seen)
    assert equal_bits(trained({"fp4": "e2m1"})[0], result)


# The engine on this pair


def test_the_patch_is_applied_and_gives_back_the_same_objects():
    targets = [CheckpointFunction, CheckpointWithoutOutput]
    before = [dict(vars(target)) for target in targets]
    with shim.patched(only=[ID], require=[ID]):
        assert vars(CheckpointFunction)["forward"] is not before[0]["forward"]
    assert all(vars(target)[name] is value for target, was in zip(targets, before) for name, value in was.items())
