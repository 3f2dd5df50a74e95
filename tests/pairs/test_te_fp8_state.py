"""Patch te-fp8-state: the FP8 state in a recompute by TE's own checkpoint, and after a region that fails."""

import contextlib
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

import shim
from shim import testing

CELLS = {"0.12.3+2.1.0": "all"}

ID = "te-fp8-state"
TE = tuple(int(part) for part in version("transformer_engine").split(".")[:2])
NAMES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
RECIPES = [name for name in NAMES if hasattr(recipes, name)]
OFF, FORWARD = (False, False), (True, False)
# From 2.19 TE tracks whatever the state is when its checkpoint begins; earlier it looks before it restores the region.
RECOMPUTE = (True, True) if TE >= (2, 19) else (False, True)
RESTORES = TE >= (2, 2)
LOOKS_FIRST = TE >= (2, 7)


@pytest.fixture(params=["stock", "patched"])
def patched(request):
    """Whether the patch is applied."""
    if request.param == "stock":
        yield False
        return
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield True


def region(recipe, enabled=True, calibrating=False, group=None):
    if hasattr(te, "autocast"):  # from 2.9
        return te.autocast(enabled=enabled, calibrating=calibrating, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, calibrating=calibrating, fp8_recipe=recipe, fp8_group=group)


def depth():
    """How many regions are open; entering one that is switched off reduces nothing."""
    with testing.record_fp8_events() as events, region(None, enabled=False):
        return events[0].depth - 1


def snapshot():
    return testing.fp8_state(), depth()


class Probe(torch.nn.Module):
    """A linear layer that writes down in which state it runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 4), []

    def forward(self, values):
        self.seen.append((torch.is_grad_enabled(), testing.fp8_state()))
        return self.linear(values)

    @property
    def states(self):
        """Those of the forward pass and of the recompute; only the latter has gradients on."""
        assert [grad for grad, _ in self.seen] == [False, True]
        return [state for _, state in self.seen]


def checkpoint(probe, values):
    """TE passes modules without TE layers on to torch's checkpoint, functions it takes itself."""
    return distributed.checkpoint(lambda given: probe(given), values)


def values():
    return torch.randn(3, 4, requires_grad=True)


def flags_of(states):
    return [(state.recompute_enabled, state.recompute_phase) for state in states]


# TE's own checkpoint


@pytest.mark.parametrize("name", RECIPES)
def test_a_recompute_is_in_the_region_of_its_forward_pass(patched, name):
    probe, recipe, given = Probe(), getattr(recipes, name)(), values()
    with region(recipe):
        output = checkpoint(probe, given)
    output.square().sum().backward()
    forward, recompute = probe.states
    assert forward.enabled and forward.recipe is recipe
    right = patched or RESTORES
    assert recompute.enabled == right and (recompute.recipe is recipe) == right
    assert flags_of(probe.states) == [FORWARD, RECOMPUTE]
    assert not testing.fp8_state().enabled and flags_of([testing.fp8_state()]) == [OFF] and depth() == 0

    gradient, given.grad = given.grad, None
    probe(given).square().sum().backward()
    assert torch.equal(gradient, given.grad)


@pytest.mark.skipif(RESTORES, reason="from 2.2 TE restores the recipe only: the patch leaves that to it")
@pytest.mark.parametrize(("enabled", "calibrating"), [(True, True), (False, True)])
def test_with_the_patch_group_and_calibration_are_restored_too(enabled, calibrating):
    probe, group = Probe(), object()
    with shim.patched(only=[ID], require=[ID]):
        with region(recipes.DelayedScaling(), enabled, calibrating, group):
            output = checkpoint(probe, values())
        output.sum().backward()
    for state in probe.states:
        assert (state.enabled, state.calibrating) == (enabled, calibrating) and state.group is group


def test_outside_of_any_region_nothing_is_quantized(patched):
    probe = Probe()
    with testing.record_fp8_events() as events:
        checkpoint(probe, values()).sum().backward()
    assert not any(state.enabled or state.calibrating for state in probe.states)
    # From 2.2 TE enters a region that is switched off, which neither quantizes nor reduces.
    assert [event.kind for event in events] == (["enter", "exit"] if RESTORES else [])
    assert not any(event.enabled for event in events)


def test_a_recompute_reduces_nothing(patched):
    """TE's own region, from 2.2, reduces once more when a recompute leaves it, and so moves every amax history on."""
    with testing.record_fp8_events() as events:
        with region(recipes.DelayedScaling()):
            output = checkpoint(Probe(), values())
        assert [event.kind for event in events] == ["enter", "exit", "reduce"]
        output.sum().backward()
    own = ["enter", "exit", "reduce"] if RESTORES else []
    assert [event.kind for event in events[3:]] == (["enter", "exit"] if patched else own)


class Scaled(torch.nn.Module):
    """What a TE layer does about amax and scales with delayed scaling, in a forward pass and in a recompute.

    Where TE has kernels (recording amax) it is plain torch; all the bookkeeping is TE's own.
    """

    def __init__(self, recipe):
        super().__init__()
        history = torch.zeros(recipe.amax_history_len, 1)
        self.state = SimpleNamespace(amax_history=history, scale=torch.ones(1))
        self.meta = {"recipe": recipe, "scaling_fwd": self.state, "fp8_group": None}

    def forward(self, values):
        manager, again = FP8GlobalStateManager, distributed.in_fp8_activation_recompute_phase()
        if again:
            manager.get_old_fp8_meta_tensors_for_recompute(self.meta)
        else:
            manager.add_fp8_tensors_to_global_buffer(self.meta)
            if distributed.is_fp8_activation_recompute_enabled():
                manager.copy_forward_fp8_meta_tensors_for_recompute(self.meta)
        amax = values.detach().abs().max()
        self.state.amax_history[0] = torch.maximum(self.state.amax_history[0], amax)
        output = values * self.state.scale.clone()
        if again:
            manager.restore_fp8_meta_tensors(self.meta)
        return output


def scales_over(steps, recompute):
    """Scale and history after every step, whose largest value falls: what a history is there to remember."""
    recipe = recipes.DelayedScaling(amax_history_len=6, amax_compute_algo=lambda history: history.max(dim=0).values)
    layers, seen = [Scaled(recipe) for _ in range(3)], []
    try:
        for step in range(steps):
            hidden = torch.full((2, 2), 8.0 / 2**step, requires_grad=True)
            with region(recipe):
                for layer in layers:
                    hidden = checkpoint(layer, hidden) if recompute else layer(hidden)
            hidden.sum().backward()
            seen.append([(layer.state.scale.clone(), layer.state.amax_history.clone()) for layer in layers])
    finally:
        FP8GlobalStateManager.reset()
    return seen


def test_scales_are_those_without_recompute(patched):
    """Over several steps: the history remembers as many of them as its length says, recompute or not."""
    without, with_recompute = scales_over(5, False), scales_over(5, True)
    same = [
        all(torch.equal(a, b) for one, other in zip(x, y) for a, b in zip(one, other))
        for x, y in zip(without, with_recompute)
    ]
    assert all(same) if patched else not all(same), same


def test_megatrons_regions_around_and_in_a_checkpoint():
    """Delayed scaling: the outer region tells the checkpoint to keep scales, the inner one is what layers see."""
    outer, inner, probe = recipes.DelayedScaling(), recipes.DelayedScaling(), Probe()
    group = object()

    def layer(given):
        with region(inner, group=group):
            return probe(given)

    with shim.patched(only=[ID], require=[ID]), testing.record_fp8_events() as events:
        with region(outer):
            output = distributed.checkpoint(layer, values())
        output.sum().backward()
    for state in probe.states:
        assert state.enabled and state.recipe is inner and state.group is group
    assert flags_of(probe.states) == [FORWARD, RECOMPUTE]
    # Only the outer region of the forward pass reduces.
    pairs = [("enter", 1), ("enter", 2), ("exit", 1), ("exit", 0)]
    found = [(event.kind, event.depth) for event in events]
    assert found == [*pairs, ("reduce", 0), *pairs]
    assert snapshot() == (testing.fp8_state(), 0) and not testing.fp8_state().enabled


@pytest.mark.parametrize("failing", ["forward", "recompute"])
def test_an_exception_in_the_function_leaves_the_state_as_it_was(patched, failing):
    def function(given):
        if torch.is_grad_enabled() == (failing == "recompute"):
            raise ZeroDivisionError
        return given * 2

    outside = snapshot()
    with pytest.raises(ZeroDivisionError):
        with region(recipes.DelayedScaling()):
            output = distributed.checkpoint(function, values())
        output.sum().backward()
    assert snapshot() == outside and not outside[0].enabled


def test_scales_after_a_recompute(patched):
    """They are those of before. Up to 2.3 a recompute loses what the forward region has updated.

    The two calls are what a TE layer does at the beginning and at the end of a recompute with delayed scaling.
    """
    forward, updated = (torch.tensor([1.0]), torch.tensor([2.0])), (torch.tensor([3.0]), torch.tensor([4.0]))
    state = SimpleNamespace(amax_history=forward[0].clone(), scale=forward[1].clone())
    meta = {"recipe": recipes.DelayedScaling(), "scaling_fwd": state}
    FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(meta)
    try:
        state.amax_history.copy_(updated[0]), state.scale.copy_(updated[1])
        FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(meta)
        assert (state.amax_history, state.scale) == forward
        FP8GlobalStateManager.restore_fp8_meta_tensors(meta)
    finally:
        FP8GlobalStateManager.reset()
    assert (state.amax_history, state.scale) == (updated if patched or TE >= (2, 4) else forward)


# Regions that cannot be entered


@pytest.fixture
def cleaned_up():
    """What stock leaves switched on would be found by every test that comes."""
    yield
    FP8GlobalStateManager.reset()
    assert not testing.fp8_state().enabled and depth() == 0


@pytest.mark.parametrize("name", [*RECIPES, "default"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_region_that_cannot_be_entered_leaves_nothing_behind(cleaned_up, patched, name, inside):
    """On a GPU that has no FP8, on its own and inside of a region that is switched off.

    Where TE looks first it does not for NVFP4, nor where no recipe is given, so that these still leak in stock.
    """
    recipe = None if name == "default" else getattr(recipes, name)()
    with testing.te_cuda_stand_ins(capability=(8, 0)):
        with region(None, enabled=False) if inside else contextlib.nullcontext():
            before = snapshot()
            # An AssertionError; 2.20 has RuntimeErrors as well.
            with pytest.raises((AssertionError, RuntimeError), match=r"(?i)compute capability|FP8|FP4|arch"):
                with region(recipe):
                    raise NotImplementedError("it was entered")
            after = snapshot()
    looks = LOOKS_FIRST and name not in ("NVFP4BlockScaling", "default")
    if looks or patched:
        assert after == before
    else:
        assert after[0].enabled and after[1] == before[1] + 1
        assert name == "default" or after[0].recipe is recipe


@pytest.mark.skipif(LOOKS_FIRST or not hasattr(recipes, "MXFP8BlockScaling"), reason="from 2.7 TE looks first")
def test_training_goes_on_in_bf16_after_a_recipe_that_the_gpu_lacks(cleaned_up, patched):
    """What the leak does to a program that catches the error: all that follows runs in FP8."""
    probe = Probe()
    with testing.te_cuda_stand_ins(capability=(9, 0)):
        with pytest.raises(AssertionError), region(recipes.MXFP8BlockScaling()):
            pass
        probe(values())
    assert [state.enabled for _, state in probe.seen] == [not patched]


# The engine on this pair


def test_revert_gives_back_the_same_objects():
    owners = [
        distributed,
        distributed._CheckpointFunction,
        distributed.activation_recompute_forward,
        TransformerEngineBaseModule,
        FP8GlobalStateManager,
    ]
    before = [dict(vars(owner)) for owner in owners]
    with shim.patched(only=[ID]) as report:
        changed = [name for owner, was in zip(owners, before) for name in was if vars(owner)[name] is not was[name]]
    assert len(changed) == len(report[ID].targets) == (10 if TE < (2, 20) else 9)
    assert all(vars(owner)[name] is value for owner, was in zip(owners, before) for name, value in was.items())
