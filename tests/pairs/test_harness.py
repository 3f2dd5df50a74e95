"""The harness against stock pairs: TE's contexts are really entered, and nothing else changes."""

import contextlib

import pytest
import torch
import transformer_engine
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

from shim import testing
from shim.testing import Layout
from shim.testing.fp8_layer import delayed_scaling, fp8_linear, fp8_region, fresh_fp8_state

CELLS = "every"

MCORE = tuple(int(part) for part in testing.release().split(".")[:2])
TE = tuple(int(part) for part in transformer_engine.__version__.split(".")[:2])

DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
MXFP8 = {"fp8": "hybrid", "fp8_recipe": "mxfp8"}
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# Stock: mcore 0.17 hands TE before 2.10 an argument that it does not know.
builds_a_model = pytest.mark.xfail(
    MCORE == (0, 17) and (2, 5) <= TE < (2, 10),
    raises=TypeError,
    strict=True,
    reason="no model can be built: get_cpu_offload_context has retain_pinned_cpu_buffers from 2.10",
)

RECIPES = [
    pytest.param(DELAYED, "TEDelayedScaling", id="delayed"),
    pytest.param(
        TENSORWISE,
        "Float8CurrentScaling",
        id="tensorwise",
        marks=pytest.mark.skipif(TE < (2, 2), reason="TE has it from 2.2"),
    ),
    pytest.param(
        MXFP8, "MXFP8BlockScaling", id="mxfp8", marks=pytest.mark.skipif(TE < (2, 1), reason="mcore wants 2.1 for it")
    ),
    pytest.param(
        NVFP4,
        "NVFP4BlockScaling",
        id="nvfp4",
        marks=pytest.mark.skipif(TE < (2, 8) or MCORE < (0, 15), reason="mcore has it from 0.15, TE from 2.8"),
    ),
]


def run(*contexts, **config):
    """One step of a small model: its result, the FP8 state at each run of the first layer's MLP, and the events."""
    seen = []
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(testing.layout_initialised(Layout()))
        events = stack.enter_context(testing.record_fp8_events())
        model = testing.build_gpt(mtp_num_layers=None, **config)
        model.decoder.layers[0].mlp.register_forward_hook(lambda *_: seen.append(testing.fp8_state()))
        result = testing.run_packed(model, testing.pack(testing.random_sequences([5, 7, 4])))
    return result, seen, events


def differ(one, other):
    return testing.worst(testing.differences(one, other))


def name_of(state):
    return type(state.recipe).__name__ if state.recipe is not None else None


def test_megatron_takes_it_for_an_installed_engine():
    from megatron.core.extensions.transformer_engine import TEDelayedScaling, TELinear
    from megatron.core.utils import get_te_version

    assert str(get_te_version()) == transformer_engine.__version__
    assert issubclass(TELinear, transformer_engine.pytorch.Linear)
    assert issubclass(TEDelayedScaling, recipes.DelayedScaling)


@builds_a_model
def test_without_fp8_no_context_is_entered():
    result, seen, events = run()
    assert result.main.isfinite().all() and not events
    assert [tuple(state) for state in seen] == [(False, False, None, None, False, False)]


@builds_a_model
@pytest.mark.parametrize("config, recipe", RECIPES)
def test_a_step_runs_inside_the_context_of_its_recipe(config, recipe):
    result, seen, events = run(**config)
    assert [(state.enabled, name_of(state)) for state in seen] == [(True, recipe)]
    assert not seen[0].recompute_enabled and not seen[0].recompute_phase
    once = [("enter", recipe, 1), ("exit", recipe, 0), ("reduce", None, 0)]
    regions = 1 if config is DELAYED else 2  # around the block, or around each layer
    assert [(event.kind, event.recipe, event.depth) for event in events] == once * regions
    assert [event.forward for event in events if event.kind == "reduce"] == [True] * regions
    assert differ(result, run()[0]) == 0  # the layers themselves are local ones
    assert not testing.fp8_state().enabled


@builds_a_model
@pytest.mark.parametrize("config, recipe", RECIPES)
def test_a_recomputed_step_is_the_same_and_its_phases_are_seen(config, recipe):
    result, seen, events = run(**config, **FULL)
    assert differ(result, run()[0]) == 0
    forward, again = seen
    assert again.recompute_phase and not forward.recompute_phase
    if config is not DELAYED and MCORE < (0, 13):  # stock: full recompute forgets the context of a layer
        assert not forward.enabled and not again.enabled and not any(event.enabled for event in events)
        return
    assert (forward.enabled, name_of(forward)) == (True, recipe)
    # TE's checkpoint restores the context from 2.2; the context of a layer is opened again by the layer itself.
    assert again.enabled == (config is not DELAYED or TE >= (2, 2))
    assert forward.recompute_enabled == (config is DELAYED or TE >= (2, 19))
    assert [event.kind for event in events].count("enter") == [event.kind for event in events].count("exit") > 0
    assert events[0].depth == 1 and not testing.fp8_state().enabled


@builds_a_model
def test_recompute_draws_the_same_dropout():
    plain, _, _ = run(**DELAYED)
    dropped, _, _ = run(**DELAYED, hidden_dropout=0.3)
    recomputed, seen, _ = run(**DELAYED, **FULL, hidden_dropout=0.3)
    assert len(seen) == 2 and differ(plain, dropped) > 1e-2
    assert differ(dropped, recomputed) == 0


@builds_a_model
def test_the_stand_ins_nest_in_either_order():
    plain, _, _ = run(**DELAYED, **FULL)
    nested, seen, _ = run(testing.te_cuda_stand_ins(), testing.megatron_on_cpu(), **DELAYED, **FULL)
    assert differ(plain, nested) == 0 and seen[0].enabled
    nested, seen, _ = run(testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), **DELAYED, **FULL)
    assert differ(plain, nested) == 0 and seen[0].enabled


@pytest.mark.parametrize("megatron_first", [True, False])
def test_the_offloading_context_can_be_entered_in_either_order(megatron_first):
    """Nothing is offloaded, since nothing is on a GPU; what counts is that modules see the flag."""
    from transformer_engine.pytorch import get_cpu_offload_context
    from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled

    contexts = [testing.megatron_on_cpu(), testing.te_cuda_stand_ins()]
    flags = []
    with contextlib.ExitStack() as stack:
        for context in contexts if megatron_first else reversed(contexts):
            stack.enter_context(context)
        offload, synchronise = get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
        weight = torch.arange(4.0, requires_grad=True)
        hidden = weight
        for _ in range(2):
            with offload:
                flags.append(is_cpu_offload_enabled())
                hidden = hidden * hidden
            hidden = synchronise(hidden)
        hidden.sum().backward()
    assert torch.equal(weight.grad, 4 * torch.arange(4.0) ** 3)
    assert flags == [True, True] and not is_cpu_offload_enabled()


def test_everything_is_put_back():
    block = __import__("megatron.core.transformer.transformer_block", fromlist=["LayerNormImpl"])
    manager = transformer_engine.pytorch.quantization if TE >= (2, 9) else transformer_engine.pytorch.fp8
    watched = [torch.cuda, torch.version, transformer_engine.pytorch.distributed, block, manager.FP8GlobalStateManager]
    before = [dict(vars(owner)) for owner in watched]
    with testing.te_cuda_stand_ins(), testing.record_fp8_events():
        assert vars(torch.cuda)["Event"] is not None
        changed = [owner for owner, was in zip(watched, before) if dict(vars(owner)) != was]
        assert manager.FP8GlobalStateManager in changed and torch.cuda in changed
    for owner, was in zip(watched, before):
        now = dict(vars(owner))
        assert now.keys() == was.keys()
        assert [name for name in was if now[name] is not was[name] and not name.endswith("_available")] == []


@builds_a_model
@pytest.mark.skipif(TE < (2, 1), reason="mcore wants 2.1 for MXFP8")
def test_a_device_without_a_recipe_is_refused():
    run(**MXFP8)
    with testing.te_cuda_stand_ins((9, 0)):
        run(**DELAYED)
        with pytest.raises((AssertionError, RuntimeError), match=r"capability 10\.0 or higher"):
            run(**MXFP8)
        transformer_engine.pytorch.distributed.FP8GlobalStateManager.reset()  # up to 2.6 the refusal leaves it enabled
    run(**MXFP8)


def test_a_compiled_operation_says_what_it_needs():
    with pytest.raises(testing.CompiledOpError, match=r"rmsnorm_fwd was called.*machine that has the extension"):
        tex.rmsnorm_fwd(torch.ones(2, 2))


# The layer whose GEMM is torch's


def test_the_layer_rounds_by_the_scales_that_the_engine_gives_it():
    """By 1 in its first region, and then by what makes the largest value that it has seen the largest of E4M3."""
    values, layer, recipe = torch.randn(3, 8), fp8_linear(8), delayed_scaling()

    def rounded(value, scale):
        return (value * scale).to(torch.float8_e4m3fn).float() / scale

    with fresh_fp8_state():
        for scale in (lambda value: torch.ones(()), lambda value: 448 / value.abs().max()):
            with fp8_region(recipe):
                output = layer(values)
            expected, weight = (rounded(value, scale(value)) for value in (values, layer.weight.detach()))
            assert torch.equal(output, expected @ weight.t()) and not torch.equal(expected, values)
            (gradient,) = torch.autograd.grad(output.sum(), layer.weight)
            assert torch.allclose(gradient, expected.sum(0).expand(8, 8))


def test_the_layer_is_a_linear_layer_outside_of_a_region():
    values, layer = torch.randn(3, 8), fp8_linear(8, seed=1)
    assert torch.equal(layer(values), values @ layer.weight.t())
    assert torch.equal(fp8_linear(8, seed=1).weight, layer.weight)
    assert not torch.equal(fp8_linear(8, seed=2).weight, layer.weight)


def test_a_fresh_state_knows_no_scale_from_before():
    layer, recipe = fp8_linear(8), delayed_scaling()
    with fresh_fp8_state(), fp8_region(recipe):
        layer(torch.ones(3, 8))
    assert not testing.fp8_state().enabled
    before = layer.fp8_meta["scaling_fwd"].scale.clone()
    with fresh_fp8_state(), fp8_region(recipe):
        pass
    assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, before)
