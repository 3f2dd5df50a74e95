"""tp-attributes: each parameter counts once in the gradient norm, whatever the optimizer, and others are left alone."""

import functools
import types
import zlib
from importlib import import_module
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from spread_experts import spread_experts

import shim
from shim import testing
from shim.patches.megatron_core import tp_attributes
from shim.patches.megatron_core.tp_attributes.proof import (
    LAYERS,
    optimizers_of_torch,
    trained,
    with_sinks,
    without_initialisation,
    wrapped_and_optimizer,
)
from shim.testing.proof import Here

CELLS = {
    "0.14.0": "all",
    "0.19.2": ["test_biases_of_spread_experts_count", "test_sinks_that_are_no_parameters_stay"],
    "0.17.0": ["test_the_muon_optimizer_gets_the_same_pass"],
}

ID = "tp-attributes"
VARIANT = shim.plan()[ID].variant
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel", "shared")
HERE = Here(world=2)
built_wrong = pytest.mark.skipif(VARIANT not in LAYERS, reason="its constructors set the attributes")


def applied():
    return shim.patched(only=[ID], require=[ID])


def attributes(model):
    """Of each parameter, the attributes that it has."""
    return {
        name: {key: getattr(weight, key) for key in ATTRIBUTES if hasattr(weight, key)}
        for name, weight in model.named_parameters()
    }


def assert_norms_of_one_rank(build, bound=1e-5, **settings):
    run = functools.partial(trained, build, **settings)
    with applied():
        right = HERE.run(run)[0]
        found = HERE.run(run, layout=testing.Layout(tp=2))
    for norms in found:
        assert norms == pytest.approx(right, rel=bound)


# ---- what stock does right


def seeded():
    return testing.build_gpt(num_layers=1, mtp_num_layers=None)


def with_its_optimizer(build):
    model = build()
    before = attributes(model)
    wrapped_and_optimizer(model)
    return before, attributes(model)


def test_what_stock_does_right_stays():
    """An initialised model keeps its attributes, and trains to the same norms, bit for bit."""
    layout = testing.Layout(tp=2)
    with applied():
        for before, after in HERE.run(functools.partial(with_its_optimizer, seeded), layout=layout):
            assert before == after
        found = HERE.run(functools.partial(trained, seeded), layout=layout)
    assert found == HERE.run(functools.partial(trained, seeded), layout=layout)


# ---- what it fixes, with every optimizer


def with_adapters():
    """Adapters train, the embedding and the output layer too; all else is frozen."""
    model = without_initialisation()
    testing.add_lora(model)
    for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
        weight.requires_grad_(True)
    return model


def with_defaults():
    """As the loops of Megatron-LM and verl leave a model before they wrap it."""
    model = without_initialisation()
    for weight in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
    return model


tied = functools.partial(without_initialisation, share_embeddings_and_output_weights=True)
gated = functools.partial(without_initialisation, gated_linear_unit=True, add_bias_linear=True)
in_bf16 = functools.partial(without_initialisation, params_dtype=torch.bfloat16, bf16=True)


@built_wrong
@pytest.mark.parametrize(
    "build", [with_adapters, with_defaults, tied, gated], ids=["lora", "defaults", "tied", "gated"]
)
def test_models_without_initialisation(build):
    assert_norms_of_one_rank(build)


@built_wrong
def test_main_parameters_in_fp32():
    """The optimizer's copies take the attributes of bf16 weights."""
    assert_norms_of_one_rank(in_bf16, bound=1e-2, bf16=True, params_dtype=torch.bfloat16)


def norm_of_first_step(build):
    """Of the distributed optimizer, whose step needs a GPU on some releases."""
    wrapped, optimizer = wrapped_and_optimizer(build(), distributed=True)
    row = torch.arange(16)[None]
    wrapped(row, row, None, labels=row.roll(-1, 1)).mean().backward()
    wrapped.finish_grad_sync()
    with optimizers_of_torch():
        optimizer.prepare_grads()
        return float(optimizer.get_grad_norm())


def in_two_replicas(run):
    """Each rank has the main parameters of a part of its shards."""
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        return run()


@pytest.mark.parametrize(
    "build", [pytest.param(with_adapters, marks=built_wrong), pytest.param(with_sinks, id="with_sinks")]
)
def test_the_distributed_optimizer(build):
    if build is with_sinks and VARIANT == "v0_12":
        pytest.skip("this release has no attention sinks")
    run = functools.partial(norm_of_first_step, build)
    with applied():
        right = HERE.run(run)[0]
        with testing.Ranks(4) as ranks:
            assert ranks.run(in_two_replicas, run) == pytest.approx([right] * 4, rel=1e-5)


def built_before_apply():
    model = without_initialisation()
    unmarked = sum(not getattr(weight, "tensor_model_parallel", False) for weight in model.parameters())
    with applied():
        wrapped_and_optimizer(model)
    return unmarked, sum(not getattr(weight, "tensor_model_parallel", False) for weight in model.parameters())


@built_wrong
def test_a_model_that_was_built_before(one_rank):
    """Only the norms' weights and biases are whole on each rank."""
    unmarked, left = built_before_apply()
    assert left == 6
    assert unmarked > left


# ---- experts of which no other rank holds a part


def with_local_experts():
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    model = testing.build_gpt(
        num_layers=1,
        mtp_num_layers=None,
        num_moe_experts=2,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        add_bias_linear=True,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel,
    )
    first = parallel_state.get_expert_model_parallel_rank()
    for name, weight in model.named_parameters():
        weight.requires_grad_("experts" in name)
        if "local_experts." in name:
            index, _, kind = name.partition("local_experts.")[2].partition(".")
            generator = torch.Generator().manual_seed(zlib.crc32(f"{int(index) + first}{kind}".encode()))
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    for expert in model.decoder.layers[0].mlp.experts.local_experts:
        # Some releases add a bias in place to what a custom function has returned.
        expert.linear_fc2.register_forward_hook(lambda _, args, output: (output[0].clone(), output[1]))
    return model


def norm_with_experts():
    wrapped, optimizer = wrapped_and_optimizer(with_local_experts())
    row = torch.arange(16)[None]
    wrapped(row, row, None, labels=row.roll(-1, 1)).mean().backward()
    # Not finalize_model_grads: it adds the gradients of different experts' biases, under sequence parallelism.
    wrapped.finish_grad_sync()
    with optimizers_of_torch():
        return float(optimizer.step()[1])


@pytest.mark.skipif(VARIANT == "v0_12", reason="its experts take no bias, or not in this layout")
def test_biases_of_spread_experts_count():
    """Each rank has one expert, whose second bias nothing marks up to 0.18."""
    layout = testing.Layout(tp=2, sequence_parallel=True)
    # Some releases look up a name of Transformer Engine that they lack without it.
    with spread_experts(), mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        right = HERE.run(norm_with_experts)[0]
        with applied():
            found = HERE.run(norm_with_experts, layout=layout)
        on_stock = HERE.run(norm_with_experts, layout=layout)
    assert found == pytest.approx([right] * 2, rel=1e-5)
    assert on_stock == (found if VARIANT == "v0_19" else pytest.approx([right * 0.9987] * 2, rel=1e-4))


# ---- what it leaves alone


def passed(chunks, variant=VARIANT, **settings):
    """Let the patch go over these chunks in front of a function that does nothing."""

    def get_megatron_optimizer(config, model_chunks, pg_collection=None):
        return config

    wrapped = tp_attributes.bindings(variant, {})[tp_attributes.GET_MEGATRON_OPTIMIZER](get_megatron_optimizer)
    assert wrapped("config", model_chunks=chunks, **settings) == "config"


class Replicated(tensor_parallel.ColumnParallelLinear):
    """A trainer's layer, which holds all rows of its weight on every rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = torch.nn.Parameter(torch.zeros(self.output_size_per_partition * 2, self.input_size))


def test_what_a_trainer_has_set_stays(one_rank):
    model = without_initialisation()
    layer = model.decoder.layers[0].mlp.linear_fc1
    model.decoder.layers[0].mlp.own = Replicated(
        8, 8, config=model.config, init_method=torch.nn.init.zeros_, bias=False
    )
    tensor_parallel.layers.copy_tensor_model_parallel_attributes(layer.weight, torch.empty(0))
    for name, value in (("tensor_model_parallel", False), ("partition_dim", 0), ("partition_stride", 1)):
        setattr(layer.weight, name, value)
    passed([model])
    assert layer.weight.tensor_model_parallel is False
    assert not hasattr(model.decoder.layers[0].mlp.own.weight, "tensor_model_parallel")


def test_models_of_megatron_fsdp_stay(one_rank):
    model = without_initialisation()
    before = attributes(model)
    for flag in ("use_megatron_fsdp", "use_custom_fsdp"):
        model.ddp_config = types.SimpleNamespace(**{flag: True})
        passed([model])
    assert attributes(model) == before


@pytest.mark.skipif(VARIANT == "v0_19", reason="the release counts experts by their own group")
def test_the_callers_own_groups_count(one_rank):
    """An expert's parameter is marked where the caller's group says that no other rank holds it."""
    for size, marked in ((1, True), (2, False)):
        expert = torch.nn.Linear(2, 2)
        for weight in expert.parameters():
            weight.allreduce = False
        passed(
            [expert], pg_collection=types.SimpleNamespace(expt_tp=types.SimpleNamespace(size=lambda size=size: size))
        )
        assert all(getattr(weight, "tensor_model_parallel", False) is marked for weight in expert.parameters())
    passed([expert], pg_collection=types.SimpleNamespace())
    assert not hasattr(expert.weight, "tensor_model_parallel")


@pytest.mark.skipif(VARIANT == "v0_12", reason="this release has no attention sinks")
def test_sinks_that_are_no_parameters_stay(one_rank):
    with mock.patch("shim.testing.model.CPUCoreAttention", DotProductAttention):
        model = testing.build_gpt(num_layers=1, mtp_num_layers=None, softmax_type="off-by-one")
    before = attributes(model)
    passed([model])
    assert attributes(model) == before


@pytest.mark.skipif(VARIANT not in ("v0_16", "v0_17"), reason="muon goes the usual way, or is not there")
def test_the_muon_optimizer_gets_the_same_pass(one_rank):
    muon = import_module("megatron.core.optimizer.muon")
    model = without_initialisation()
    with applied(), pytest.raises(Exception, match=r"Emerging|dist|muon"):  # its first checks
        muon.get_megatron_muon_optimizer(types.SimpleNamespace(use_distributed_optimizer=True), [model])
    assert model.output_layer.weight.tensor_model_parallel
