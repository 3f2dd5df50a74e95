"""What patches read of an argument is what upstream declares of its type, and no field of one subclass or caller."""

import importlib

import pytest
import torch

import shim
from shim import testing

CELLS = {"0.12.0": "all", "0.19.2": "all"}

pytestmark = pytest.mark.usefixtures("one_rank")
WIDTH, ROWS = 4, 6


class Function(torch.nn.Module):
    """A model that is no transformer: what schedules ask for, and nothing else."""

    def __init__(self, config):
        super().__init__()
        self.config, self.inner = config, torch.nn.Linear(WIDTH, WIDTH)
        self.model_type = importlib.import_module("megatron.core.enums").ModelType.encoder_or_decoder

    def set_input_tensor(self, given):
        assert given is None or given == [None]

    def forward(self, row):
        return self.inner(row)


def parallel_config():
    made = importlib.import_module("megatron.core.model_parallel_config").ModelParallelConfig(
        pipeline_dtype=torch.float32
    )
    made.hidden_size = WIDTH  # upstream reads it of any config
    return made


@pytest.mark.parametrize("name", ["forward_backward_no_pipelining", "forward_backward_pipelining_without_interleaving"])
def test_schedules(name):
    """They take any ModelParallelConfig, and any module."""
    model, rows = Function(parallel_config()), [torch.ones(2, 1, WIDTH), torch.zeros(2, 1, WIDTH)]

    def forward(data, stage):
        return stage(next(data)), lambda output: (output.mean(), {"loss": output.detach().mean()})

    def run():
        return importlib.import_module("megatron.core.pipeline_parallel.schedules").__dict__[name](
            forward_step_func=forward,
            data_iterator=iter(rows),
            model=[model],
            num_microbatches=len(rows),
            seq_length=2,
            micro_batch_size=1,
            forward_only=True,
        )

    expected = run()
    with shim.patched():
        assert run() == expected


class Layer(torch.nn.Module):
    """A layer of a TransformerBlock that has a forward alone, which is all that BaseTransformerLayer asks for."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, *args, context=None, **kwargs):
        return self.inner(hidden_states), context


def block_of(layers, **options):
    """A TransformerBlock of the release around these layers."""
    options = {"num_layers": max(1, len(layers)), "mtp_num_layers": None, **options}
    block = testing.build_gpt(**options).decoder.train()
    block.layers = torch.nn.ModuleList(layers)
    block.num_layers_per_pipeline_rank, block.final_layernorm, block.post_process = len(layers), None, False
    return block


@pytest.mark.parametrize(("method", "chunk"), [("uniform", 2), ("block", 2), ("uniform", 1)])
def test_recomputed_layers(method, chunk):
    """Layers of a block need neither a number nor a config."""
    options = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": chunk}
    layers = [Layer() for _ in range(3)]
    with shim.patched():
        block = block_of(layers, **options)
        block(torch.ones(ROWS, 1, WIDTH), None).sum().backward()
    assert all(layer.inner.weight.grad is not None for layer in layers)


def test_a_stage_without_layers():
    """A free layout may leave a stage no layer, also where hyper connections are recomputed (0.20)."""
    options = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    with shim.patched():
        block = block_of([], **options)
        block.config.recompute_modules = ["mhc"]
        states = torch.ones(ROWS, 1, WIDTH)
        assert torch.equal(block(states, None), states)


class MambaLayer(torch.nn.Module):
    """Somebody's own layer with a name and a method of upstream's, without its attributes."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, states):
        return self._apply_gated_norm(states)

    def _apply_gated_norm(self, states):
        return states * self.weight


def test_a_model_that_is_none_of_upstreams():
    """shim.check and what runs around a step take any module."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), MambaLayer())
    ddp = importlib.import_module("megatron.core.distributed")
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    config = testing.build_gpt(mtp_num_layers=None).config
    with shim.patched():
        report = shim.check(model)
        wrapped = ddp.DistributedDataParallel(config, ddp.DistributedDataParallelConfig(), model)
        wrapped(torch.ones(2, WIDTH)).sum().backward()
        finalize.finalize_model_grads([wrapped])
        shim.check(wrapped)
    assert {report[id].state for id in report}.isdisjoint({"shadowed", "conflict", "failed"})
    assert all(weight.main_grad.any() for weight in model.parameters())
