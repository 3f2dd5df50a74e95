"""biased-mlp-recompute: a recomputed MLP with biases trains as one that is not, to the bit, and each weight once."""

import collections
import contextlib

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import shim
from shim import testing
from shim.patches.megatron_core.biased_mlp_recompute.proof import MODEL, RECOMPUTE, loss_of
from shim.testing import Layout
from shim.testing.model import ON_CPU

CELLS = {"0.15.3": "all"}

ID = "biased-mlp-recompute"
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch"),
]


@contextlib.contextmanager
def inside(layout):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        yield


def applied():
    return shim.patched(only=[ID], require=[ID])


def never(*args):
    raise AssertionError("this MLP would run on and on")


def stopped(model, runs=4):
    """The model, whose MLPs raise after some runs each, so that a backward without end has one."""
    for module in model.modules():
        if hasattr(module, "linear_fc2"):
            counts = iter(range(runs))
            module.register_forward_pre_hook(lambda *_, left=counts: None if next(left, None) is not None else never())
    return model


def leaves(model):
    return all(weight.is_leaf for weight in model.parameters())


def step(model, times=1):
    """Gradients of a step, by name, and how often each arrived."""
    arrived = collections.Counter()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda _, name=name: arrived.update([name]))
    for _ in range(times):
        loss = loss_of(model)
        assert leaves(model)
        loss.backward()
    assert leaves(model)
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, arrived


def same(found, truth):
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("options", [{}, {"mtp_num_layers": 1}, {"gated_linear_unit": True}], ids=str)
def test_gradients_are_those_without_recompute(options):
    """Of two steps that add up, each of which reaches each weight once."""
    truth, _ = step(testing.build_gpt(**{**MODEL, **options}), times=2)
    with applied():
        found, arrived = step(stopped(testing.build_gpt(**{**MODEL, **RECOMPUTE, **options})), times=2)
    assert any(name.endswith("linear_fc2.bias") for name in truth)
    assert same(found, truth)
    assert set(arrived) == set(truth) and set(arrived.values()) == {2}


def test_a_vision_tower():
    """Its layers are those of a language model, and have biases as a rule."""
    clip = pytest.importorskip("megatron.core.models.vision.clip_vit_model", exc_type=ImportError)
    specs = pytest.importorskip("megatron.core.models.vision.vit_layer_specs", exc_type=ImportError)

    def gradients(**options):
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, **ON_CPU, **options
        )
        spec = specs.get_vit_layer_with_local_spec()
        tower = stopped(clip.CLIPViTModel(config, spec, WrappedTorchNorm, patch_dim=4, img_h=8, img_w=8)).train()
        tower(torch.ones(1, 3, 8, 8)).square().sum().backward()
        assert leaves(tower)
        return {name: weight.grad for name, weight in tower.named_parameters()}

    truth = gradients()
    with applied():
        found = gradients(**RECOMPUTE)
    assert found["decoder.layers.0.mlp.linear_fc2.bias"].any() and same(found, truth)


def test_with_adapters_frozen_biases_stay_frozen():
    """The embeddings have a hook that makes them require a gradient, as trainers set it."""

    def adapted(**options):
        model = testing.build_gpt(**{**MODEL, **options})
        testing.add_lora(model)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
        return stopped(model)

    truth, _ = step(adapted())
    with applied():
        model = adapted(**RECOMPUTE)
        before = {name: weight.requires_grad for name, weight in model.named_parameters()}
        found, _ = step(model)
        assert {name: weight.requires_grad for name, weight in model.named_parameters()} == before
    assert truth and same(found, truth)


def test_a_trained_bias_beside_frozen_weights():
    """BitFit: all is frozen but biases."""

    def biases_only(**options):
        model = testing.build_gpt(**{**MODEL, **options})
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.endswith("bias"))
        return stopped(model)

    truth, _ = step(biases_only())
    with applied():
        found, _ = step(biases_only(**RECOMPUTE))
    assert truth and same(found, truth)


def test_without_gradients_nothing_changes():
    with applied(), torch.no_grad():
        model = testing.build_gpt(**MODEL, **RECOMPUTE)
        assert torch.equal(loss_of(model), loss_of(testing.build_gpt(**MODEL)))
        assert leaves(model)


@pytest.mark.parametrize("trained", [True, False])
def test_a_function_that_returns_a_parameter(trained):
    """Alone, or beside others; a bias of its own, and what is no tensor."""
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=trained)
    states = torch.arange(3.0, requires_grad=True)

    def several(states):
        return states * weight, weight, weight[:2], states, None

    with applied():
        product, whole, part, given, nothing = tensor_parallel.checkpoint(several, False, states)
        assert weight.is_leaf and weight.requires_grad is trained and nothing is None
        assert whole.data_ptr() == weight.data_ptr() and torch.equal(whole, weight)
        (product.sum() + 2 * whole.sum() + 3 * part.sum() + given.sum()).backward()
        assert torch.equal(states.grad, torch.full((3,), 2.0))
        assert (weight.grad is None) is not trained
        if trained:
            assert weight.grad.tolist() == [5.0, 6.0, 4.0]
        alone = tensor_parallel.checkpoint(lambda states: weight, False, states)
        assert weight.is_leaf and alone is not weight and torch.equal(alone, weight)


def test_an_error_inside_leaves_parameters_alone():
    def fails(states):
        raise ValueError("inside")

    with applied():
        model = testing.build_gpt(**MODEL, **RECOMPUTE)
        model.decoder.layers[1].mlp.register_forward_hook(lambda *_: fails(None))
        with pytest.raises(ValueError, match="inside"):
            loss_of(model)
        assert leaves(model)


def test_an_mlp_without_biases_returns_what_stock_returns():
    stock = tensor_parallel.random.CheckpointFunction.forward
    with applied():
        context = type("Context", (), {"save_for_backward": lambda *_: None})()
        outputs = (torch.ones(2), None)
        found = tensor_parallel.random.CheckpointFunction.forward(context, lambda: outputs, False)
        assert found is outputs
    assert tensor_parallel.random.CheckpointFunction.forward is stock


def on_ranks(layout, recompute):
    """The gradients of a step with DistributedDataParallel, whose buckets start as soon as each weight has its own."""
    with inside(layout), applied():
        options = RECOMPUTE if recompute else {}
        model = stopped(testing.build_gpt(**MODEL, **options, sequence_parallel=layout.sequence_parallel))
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1000)
        whole = DistributedDataParallel(model.config, config, model)
        loss_of(whole).backward()
        assert leaves(model)
        finalize_model_grads([whole])
        return {name: weight.main_grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_on_two_ranks(ranks2, layout):
    truth = ranks2.run(on_ranks, layout, False)
    for found, right in zip(ranks2.run(on_ranks, layout, True), truth, strict=True):
        assert same(found, right) and any(grad.any() for name, grad in found.items() if "linear_fc2.bias" in name)
