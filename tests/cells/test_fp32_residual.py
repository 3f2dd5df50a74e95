"""fp32-residual: under the flag the residual stream is fp32 in all layers and between stages, and nowhere else."""

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from foreign_functions import state_beside

import shim
from shim import testing
from shim._engine.models import run
from shim.patches.megatron_core.fp32_residual import PIPELINED, SCHEDULES, probe
from shim.patches.megatron_core.fp32_residual.proof import LAYERS, TOKENS, build, mamba_layer, norms_as_of_apex
from shim.patches.megatron_core.masked_microbatch.proof import microbatches, scheduled

CELLS = {"0.14.0": "all"}

ID = "fp32-residual"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
pytestmark = pytest.mark.usefixtures("one_rank")


def patched(active=True):
    return shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()


def patched_where_needed():
    return patched(NEEDED)


def step(**options):
    """The dtypes that layers return, the losses of a step, and the gradients."""
    with norms_as_of_apex():
        model, dtypes = build(**options), []
        for layer in model.decoder.layers:
            layer.register_forward_hook(lambda layer, args, output: dtypes.append(output[0].dtype))
        row = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        losses = model(row, torch.arange(TOKENS)[None], None, labels=row.roll(-1, 1))
        losses.mean().backward()
    return dtypes, losses.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def same(found, expected):
    return all(torch.equal(found[name], expected[name]) for name in expected)


@needed
def test_stock_rounds_behind_the_first_addition():
    dtypes, _, _ = step()
    assert dtypes == [torch.bfloat16] * LAYERS


def test_every_layer_returns_fp32():
    with patched_where_needed():
        dtypes, losses, gradients = step()
    assert dtypes == [torch.float32] * LAYERS
    assert losses.isfinite().all()
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())


def test_full_recompute_changes_no_bit():
    with patched_where_needed():
        _, expected, without = step()
        _, found, recomputed = step(**FULL)
    assert torch.equal(found, expected)
    assert same(recomputed, without)


@needed
@pytest.mark.parametrize(
    "options",
    [{"fp32_residual_connection": False}, {"bf16": False, "params_dtype": torch.float32}],
    ids=["off", "fp32"],
)
def test_without_the_flag_or_in_fp32_every_bit_stays(options):
    dtypes, losses, gradients = step(**options)
    with patched():
        found_dtypes, found, found_gradients = step(**options)
    assert found_dtypes == dtypes
    assert torch.equal(found, losses)
    assert same(found_gradients, gradients)


@needed
def test_an_exception_leaves_the_layer_as_it_was():
    layer = build().decoder.layers[0]
    before = {name: held for name, held in vars(layer).items() if name.endswith("_bda")}

    def failing(*args, **kwargs):
        raise OSError("no attention")

    layer.self_attention.forward = failing
    with patched(), norms_as_of_apex(), pytest.raises(OSError, match="no attention"):
        layer(torch.ones(TOKENS, 1, 32), None)
    assert before
    assert all(vars(layer)[name] is held for name, held in before.items())


@needed
@pytest.mark.parametrize("flag", [True, False])
def test_mamba_layers(flag):
    hidden = torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(0))
    hidden = hidden if flag else hidden.bfloat16()
    layer, given = mamba_layer(flag), []
    layer.mixer.register_forward_pre_hook(lambda mixer, args: given.append(args[0].dtype))
    with patched():
        found = layer.forward(hidden, None)
    assert given == [torch.bfloat16]
    expected = hidden + layer.mixer(hidden)[0].to(hidden.dtype)
    assert found.dtype == hidden.dtype
    assert torch.equal(found, expected)


def pipeline_on_rank(pp):
    layout = testing.Layout(pp=pp)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), patched_where_needed(), norms_as_of_apex():
        model = build(share_embeddings_and_output_weights=False)
        dtype = model.config.pipeline_dtype
        scheduled(model, microbatches([False, False]))
        assert model.config.pipeline_dtype == dtype
        return {layer.layer_number: [weight.grad for weight in layer.parameters()] for layer in model.decoder.layers}


def test_two_pipeline_stages_train_as_one(ranks2):
    """The stream goes to the second stage in fp32, and its gradient comes back so: no bit is lost on the way."""
    first, second = ranks2.run(pipeline_on_rank, 2)
    expected = pipeline_on_rank(1)
    found = {**first, **second}
    assert found.keys() == expected.keys()
    for number, gradients in expected.items():
        for one, other in zip(found[number], gradients, strict=True):
            assert torch.equal(one, other), number


class Doubles(torch.nn.Module):
    """A pipeline stage with no more than schedules ask for. It has no weights."""

    def __init__(self, config, stage):
        super().__init__()
        self.config, self.vp_stage, self.given = config, stage, None
        self.model_type = importlib.import_module("megatron.core.enums").ModelType.encoder_or_decoder

    def set_input_tensor(self, given):
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, row):
        return 2 * (row if self.given is None else self.given)


def stages_that_are_no_transformer(virtual):
    """What this rank logs in a forward pass of its stages, under the release's own ModelParallelConfig."""
    made = importlib.import_module("megatron.core.model_parallel_config").ModelParallelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=virtual == 1,
    )
    made.hidden_size = 4  # upstream reads it of any config
    stages, rows = [Doubles(made, stage) for stage in range(virtual)], [torch.full((2, 1, 4), n) for n in (1.0, 2.0)]

    def forward(data, stage):
        return stage(next(data)), lambda output: (output.mean(), {"loss": output.mean()})

    layout = testing.Layout(pp=2, vp=virtual)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), patched_where_needed():
        logged = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(rows) for _ in stages] if virtual > 1 else iter(rows),
            model=stages,
            num_microbatches=len(rows),
            seq_length=2,
            micro_batch_size=1,
            forward_only=True,
        )
    return [float(each["loss"]) for each in logged]


@pytest.mark.parametrize("virtual", [1, 2], ids=["1f1b", "interleaved"])
def test_schedules_take_any_model_parallel_config(ranks2, virtual):
    """Schedules ask for a ModelParallelConfig, which has no fp32_residual_connection."""
    stages = 2 * virtual
    assert ranks2.run(stages_that_are_no_transformer, virtual)[-1] == [2.0**stages, 2.0 * 2.0**stages]


# Schedules of others


def of_others(*args, **kwargs):
    raise NotImplementedError("a schedule of a trainer")


def model_of(**fields):
    model = torch.nn.Module()
    pipelined = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16, "fp32_residual_connection": True}
    model.config = SimpleNamespace(**{**pipelined, **fields})
    return model


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([], "only a model says"),
        ([torch.nn.Module()], "only a model says"),
        ([model_of()], "cannot try a schedule"),
        ([model_of(fp32_residual_connection=False), model_of()], "cannot try a schedule"),
        ([model_of(fp32_residual_connection=False)], ""),
        ([model_of(pipeline_model_parallel_size=1)], ""),
        ([model_of(pipeline_dtype=torch.float32)], ""),
        ([model_of(pipeline_dtype=None)], ""),
    ],
)
def test_a_schedule_of_others_loses_nothing_without_the_flag_or_messages(models, expected):
    """Which messages it sends cannot be tried."""
    found, why = run(probe, of_others, f"{SCHEDULES}:{PIPELINED[0]}", models)
    assert found is (None if expected else True) and (expected in why if expected else not why)


@needed
@pytest.mark.parametrize(
    ("name", "first", "flag", "state"),
    [(PIPELINED[0], "trainer", False, "applied"), (PIPELINED[1], "shim", True, "unknown")],
)
def test_what_the_models_say_is_the_state(monkeypatch, name, first, flag, state):
    model = build(fp32_residual_connection=flag, pipeline_dtype=torch.bfloat16)
    model.config.pipeline_model_parallel_size = 2
    found = state_beside(monkeypatch, ID, importlib.import_module(SCHEDULES), name, of_others, first, [model])
    assert found.state == state, str(found)
