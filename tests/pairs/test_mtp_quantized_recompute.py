"""Patch mtp-recompute under FP8 and FP4: an MTP layer runs, and is recomputed, in the regions of a decoder layer."""

import contextlib
import functools
from importlib.metadata import version
from unittest import mock

import megatron.core.extensions.transformer_engine as extensions
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from recompute_cases import equal_bits
from scaled_module import Scaled, clean_state, delayed

import shim
from shim import testing
from shim.patches.megatron_core.mtp_recompute.proof import OneSequence
from shim.testing import Layout

CELLS = {
    "0.15.3+2.9.0": "all",
    "0.12.0+2.2.0": ["test_stock_asks_the_layer_for_an_attribute_it_has_not"],
    "0.13.1+2.5.0": ["test_stock_does_not_recompute_mtp_layers"],
    "0.18.2+2.18.0": ["test_stock_cannot_recompute_mtp_layers"],
    "0.19.2+2.20.2": [
        "test_stock_is_in_the_same_regions_in_the_one_case_that_it_can",
        "test_depths_with_one_layer_take_their_own_scales",
    ],
}

ABOUT = ["mtp-recompute"]  # the patches, see chosen.py

ID, PACKED, REGION, TE_ID = "mtp-recompute", "mtp-packed-sequences", "fp8-fp4-recompute", "te-fp8-state"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
TE = tuple(int(part) for part in version("transformer_engine").split(".")[:2])

# The options of the config, and the type of the recipe that they stand for.
RECIPES = {
    "delayed": ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "TEDelayedScaling"),
    "tensorwise": ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "Float8CurrentScaling"),
    "mxfp8": ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "MXFP8BlockScaling"),
    "nvfp4": ({"fp4": "e2m1"}, "NVFP4BlockScaling"),
}
if TE < (2, 1):
    del RECIPES["mxfp8"]  # megatron-core wants 2.1 for it
if TE < (2, 2):
    del RECIPES["tensorwise"]  # megatron-core wants 2.2 for it
if VERSION < (0, 15) or TE < (2, 8):
    del RECIPES["nvfp4"]  # FP4 came with 0.15 and 2.8
METHODS = {
    f"{method} {layers}": {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }
    for method, layers in (("uniform", 1), ("uniform", 2), ("block", 1), ("block", 2))
}
UNIFORM = METHODS["uniform 1"]
# Whether the second of two layers, of the decoder as of MTP, is recomputed; the first always is.
SECOND_RECOMPUTED = {"uniform 1": True, "uniform 2": True, "block 1": False, "block 2": True}
OFF = (False, False)

of_each_recipe = pytest.mark.parametrize("recipe", RECIPES)
has_fp4 = pytest.mark.skipif("nvfp4" not in RECIPES, reason="FP4 came with 0.15 and Transformer Engine 2.8")


@pytest.fixture(scope="module")
def release(request):
    """The pair with this patch or without, and either way with what is wrong besides it put right.

    Entered once for all tests that want the same, because applying takes longer than a test.
    """
    only = [ID, PACKED, REGION, TE_ID] if request.param == "patched" else [REGION, TE_ID]
    with shim.patched(only=only, require=only[:1]) as report:
        assert report[only[0]].state == "applied", str(report)
        yield


applied = pytest.mark.parametrize("release", ["patched"], indirect=True)
stock = pytest.mark.parametrize("release", ["stock"], indirect=True)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    """Once for all, because it takes longer than a test."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


ROWS = {
    "unpacked": OneSequence(**vars(testing.pack(testing.random_sequences((9,))))),
    "packed": testing.pack(testing.random_sequences((5, 7, 4)), align=4),
}


def inner_layer(layer):
    """The transformer layer in an MTP layer, whose name changed in 0.17."""
    return getattr(layer, "mtp_model_layer", None) or layer.transformer_layer


def watched(model):
    """What each transformer layer sees: its name -> [(gradients on, state)], in the order of its calls."""
    seen = {f"decoder {n}": (layer, []) for n, layer in enumerate(model.decoder.layers)}
    seen |= {f"mtp {n}": (inner_layer(layer), []) for n, layer in enumerate(model.mtp.layers)}
    for layer, calls in seen.values():
        layer.mlp.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append((torch.is_grad_enabled(), testing.fp8_state()))
        )
    return {name: calls for name, (_, calls) in seen.items()}


def trained(config, row="unpacked", layers=2):
    model = testing.build_gpt(mtp_num_layers=layers, **config)
    seen = watched(model)
    return testing.run_packed(model, ROWS[row]), seen


def comparable(calls):
    """Recipes are made anew for each region: their type is what can be compared. TE's checkpoint restores no group."""
    return [(grad, state.enabled, state.calibrating, type(state.recipe), *state[4:]) for grad, state in calls]


def expected_flags(recipe, recomputed):
    """[(gradients on, recompute_enabled, recompute_phase)] for each call of a layer."""
    if not recomputed:
        return [(True, False, False)]
    # From 2.19 all in a checkpoint is tracked. Earlier TE looks for a region when the checkpoint begins, and before it
    # restores that region in the recompute: there is one only with delayed scaling, and in the forward pass.
    forward = TE >= (2, 19) or recipe == "delayed"
    return [(False, forward, False), (True, TE >= (2, 19), True)]


# With the patch


@applied
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("method", METHODS)
@of_each_recipe
def test_mtp_layers_see_what_decoder_layers_see(release, recipe, method, row):
    config, kind = RECIPES[recipe]
    plain, _ = trained(config, row)
    result, seen = trained({**config, **METHODS[method]}, row)
    assert len(seen) == 4
    for number, recomputed in enumerate([True, SECOND_RECOMPUTED[method]]):
        calls = seen[f"mtp {number}"]
        assert [(grad, *state[4:]) for grad, state in calls] == expected_flags(recipe, recomputed)
        for _, state in calls:
            assert state.enabled and not state.calibrating and type(state.recipe).__name__ == kind
            assert state.group is parallel_state.get_amax_reduction_group(with_context_parallel=True)
        assert comparable(calls) == comparable(seen[f"decoder {number}"])
    assert equal_bits(plain, result)
    assert any(name.startswith("mtp.") for name in result.grads)


@applied
@of_each_recipe
def test_without_recompute_mtp_layers_are_in_the_same_regions(release, recipe):
    config, kind = RECIPES[recipe]
    _, seen = trained(config)
    for number in range(2):
        ((grad, state),) = seen[f"mtp {number}"]
        assert grad and state.enabled and type(state.recipe).__name__ == kind
        assert (state.recompute_enabled, state.recompute_phase) == OFF
        assert comparable(seen[f"mtp {number}"]) == comparable(seen[f"decoder {number}"])


@applied
def test_without_quantization_no_region_is_entered(release):
    with testing.record_fp8_events() as events:
        _, seen = trained(UNIFORM)
    assert events == [] and all(state[:4] == testing.fp8_state()[:4] for calls in seen.values() for _, state in calls)
    assert [len(calls) for calls in seen.values()] == [2, 2, 2, 2]


@pytest.fixture
def checkpoints(monkeypatch):
    """The calls of te_checkpoint for MTP layers, (positional, by name), and whom to tell when one begins and ends.

    MTP layers take te_checkpoint when they are called; the decoder has its own name for it, which stays as it is.
    """
    original, calls, marks = extensions.te_checkpoint, [], []

    @functools.wraps(original)
    def te_checkpoint(*args, **kwargs):
        calls.append((args, kwargs))
        for mark in marks:
            mark("checkpoint")
        output = original(*args, **kwargs)
        for mark in marks:
            mark("checkpointed")
        return output

    monkeypatch.setattr(extensions, "te_checkpoint", te_checkpoint)
    return calls, marks


@applied
@of_each_recipe
def test_regions_around_and_in_the_checkpoint(release, checkpoints, recipe):
    """With delayed scaling one around it, where amax is reduced; for all of them regions inside, one level deeper."""
    config, kind = RECIPES[recipe]
    model = testing.build_gpt(mtp_num_layers=1, **config, **UNIFORM)
    (layer,) = model.mtp.layers
    with testing.record_fp8_events() as events:
        layer.register_forward_pre_hook(lambda *_: events.append("layer"))
        layer.register_forward_hook(lambda *_: events.append("layer left"))
        inner_layer(layer).mlp.register_forward_pre_hook(lambda *_: events.append("mlp"))
        checkpoints[1].append(events.append)
        testing.run_packed(model, ROWS["unpacked"])

    found = [event if isinstance(event, str) else (event.kind, event.depth) for event in events]
    entered = [event for event in events if not isinstance(event, str) and event.kind == "enter" and event.enabled]
    assert {event.recipe for event in entered} == {kind}
    forward = found[found.index("layer") + 1 : found.index("layer left")]
    delayed = recipe == "delayed"

    def inside(depth):
        """0.14 and later quantize the projection and the layer in two regions; FP4 has the decoder's one for both."""
        enter, leave = ("enter", depth), ("exit", depth - 1)
        return [enter, "mlp", leave] if VERSION < (0, 14) or recipe == "nvfp4" else [enter, leave, enter, "mlp", leave]

    checkpoint = ["checkpoint", *inside(2 if delayed else 1), "checkpointed"]
    assert forward == ([("enter", 1), *checkpoint, ("exit", 0), ("reduce", 0)] if delayed else checkpoint)
    if TE >= (2, 2):  # 2.1 enters no region in a recompute where there was none around the checkpoint
        # TE's own checkpoint is in a region of its own here, with other recipes than delayed one that is switched off.
        backward = found[found.index("layer left") + 1 :]
        start = backward.index("mlp") - inside(2).index("mlp") - 1
        recompute = [("enter", 1), *inside(2), ("exit", 0)]
        assert backward[start : start + len(recompute)] == recompute


@applied
@of_each_recipe
def test_the_checkpoint_gets_tensors_by_position_and_the_group_of_the_layer(release, checkpoints, recipe):
    model = testing.build_gpt(mtp_num_layers=1, **RECIPES[recipe][0], **UNIFORM)
    (layer,) = model.mtp.layers
    group = parallel_state.get_tensor_model_parallel_group()
    if hasattr(layer, "tp_group"):  # from 0.17
        group = layer.tp_group = torch.distributed.new_group([0])
    testing.run_packed(model, ROWS["unpacked"])
    (((run, distribute, tracker, found, *tensors), by_name),) = checkpoints[0]
    assert callable(run) and not distribute and tracker is tensor_parallel.random.get_cuda_rng_tracker
    assert found is group and by_name == {}
    given = [tensor for tensor in tensors if tensor is not None]
    assert [tuple(tensor.shape) for tensor in given[:2]] == [(9, 1, model.config.hidden_size)] * 2
    assert all(isinstance(tensor, torch.Tensor) for tensor in given)
    # Up to 0.13 a layer is served as 0.12 wants it, whose te_checkpoint takes five inputs, no more and no less.
    assert len(tensors) == 5 if VERSION < (0, 14) else tensors == given


# Stock is wrong


@stock
@pytest.mark.skipif(VERSION > (0, 12), reason="0.12 only")
@pytest.mark.parametrize("recompute", [{}, UNIFORM], ids=["", "recompute"])
@pytest.mark.parametrize("recipe", [name for name in ("delayed", "mxfp8") if name in RECIPES])
def test_stock_asks_the_layer_for_an_attribute_it_has_not(release, recipe, recompute):
    with pytest.raises(AttributeError, match="tp_only_amax_red"):
        trained({**RECIPES[recipe][0], **recompute})


@stock
@pytest.mark.skipif(VERSION != (0, 13), reason="0.13 only")
@of_each_recipe
def test_stock_does_not_recompute_mtp_layers(release, recipe):
    _, seen = trained({**RECIPES[recipe][0], **UNIFORM})
    assert [len(calls) for calls in seen.values()] == [2, 2, 1, 1]


@stock
@pytest.mark.skipif(not (0, 14) <= VERSION <= (0, 17), reason="0.14 to 0.17")
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
def test_stock_does_not_train_mtp_layers(release, checkpoints, recipe):
    """Tensors that the checkpoint gets by name drop out of its graph: no error, no recompute, and no gradient."""
    result, seen = trained({**RECIPES[recipe][0], **UNIFORM}, layers=1)
    assert {"hidden_states", "decoder_input"} <= set(checkpoints[0][0][1])
    assert [len(calls) for calls in seen.values()] == [2, 2, 1]
    assert result.grads and not any(name.startswith("mtp.") for name in result.grads)
    assert any(name.startswith("mtp.") for name in trained(RECIPES[recipe][0], layers=1)[0].grads)
    if recipe == "delayed" and TE < (2, 19):  # no region around the checkpoint
        ((_, state),) = seen["mtp 0"]
        assert (state.recompute_enabled, state.recompute_phase) == OFF


@stock
@pytest.mark.skipif(VERSION != (0, 18), reason="0.18 only")
@of_each_recipe
def test_stock_cannot_recompute_mtp_layers(release, recipe):
    with pytest.raises(TypeError, match="padding_mask"):
        trained({**RECIPES[recipe][0], **UNIFORM})


@stock
@pytest.mark.skipif(VERSION != (0, 19), reason="0.19 only")
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
def test_stock_is_in_the_same_regions_in_the_one_case_that_it_can(release, checkpoints, recipe):
    """One layer and method uniform; its group is the global one, whatever the layer's is."""
    _, seen = trained({**RECIPES[recipe][0], **UNIFORM}, layers=1)
    assert comparable(seen["mtp 0"]) == comparable(seen["decoder 0"])
    assert [(grad, *state[4:]) for grad, state in seen["mtp 0"]] == expected_flags(recipe, True)
    assert checkpoints[0][0][0][3] is parallel_state.get_tensor_model_parallel_group()


@stock
@has_fp4
@pytest.mark.parametrize("recompute", [{}, UNIFORM], ids=["", "recompute"])
def test_stock_ignores_fp4(release, recompute):
    cannot = recompute and VERSION == (0, 18)
    config = {**RECIPES["nvfp4"][0], **recompute} if "nvfp4" in RECIPES else {}
    with pytest.raises(TypeError, match="padding_mask") if cannot else contextlib.nullcontext():
        _, seen = trained(config)
        assert all(state.enabled for name in ("decoder 0", "decoder 1") for _, state in seen[name])
        assert not any(state.enabled for name in ("mtp 0", "mtp 1") for _, state in seen[name])


# One layer for all depths


class Rescaled(torch.nn.Module):
    """What a layer of the model returns, times the scale of a module of Transformer Engine, which moves on."""

    def __init__(self, layer):
        super().__init__()
        self.scaled = Scaled()
        layer.mlp.register_forward_hook(lambda mlp, given, output: (self.scaled(output[0]), *output[1:]))


@pytest.mark.skipif(VERSION < (0, 17), reason="mtp_use_repeated_layer came with 0.17")
@pytest.mark.parametrize("patches", [[ID, PACKED, REGION], [ID, PACKED, REGION, TE_ID]], ids=["stock", "patched"])
def test_depths_with_one_layer_take_their_own_scales(patches):
    """Recomputes come in the order of backward, the last depth first: each of them in the scale of its forward pass.

    Without te-fp8-state they take the scales in the order of the forward passes.
    """

    def step(config):
        # A depth enters one region where it is recomputed and two where not: a short history would forget earlier.
        recipe = delayed(length=64)
        with clean_state(), mock.patch("megatron.core.fp8_utils.get_fp8_recipe", lambda _: recipe):
            model = testing.build_gpt(mtp_num_layers=3, mtp_use_repeated_layer=True, **RECIPES["delayed"][0], **config)
            (layer,) = model.mtp.layers
            rescaled = Rescaled(inner_layer(layer))
            result = testing.run_packed(model, ROWS["unpacked"])
            return result, *rescaled.scaled.state

    with shim.patched(only=patches, require=patches):
        (expected, scale, history), (found, same, _) = step({}), step(UNIFORM)
    assert len(set(history[:, 0].tolist())) > 3  # each depth has found another scale
    # Without it the recompute moves scales on, too.
    assert (equal_bits(expected, found) and torch.equal(scale, same)) == (TE_ID in patches)
    assert torch.equal(expected.main, found.main) and all(map(torch.equal, expected.mtp, found.mtp))
