"""tp-attributes on layers of Transformer Engine: which marks they have when their optimizer is made."""

import dataclasses
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer, tensor_parallel
from megatron.core.extensions import transformer_engine as extensions
from megatron.core.transformer.moe.moe_layer import MoELayer
from spread_experts import spread_experts

import shim
from shim import testing
from shim.patches.megatron_core.muon_qkv_shapes.proof import LR, muon, orthogonal
from shim.patches.megatron_core.tp_attributes.proof import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    adapted,
    layers_can_be_built,
    optimizers_of_torch,
    with_experts,
    wrapped_and_optimizer,
)
from shim.testing.cpu import type_on_a_gpu
from shim.testing.proof import CannotRunError, Here

CELLS = {
    "0.13.1+2.5.0": "all",
    "0.19.2+2.20.2": [
        "test_muon_orthogonalizes_the_whole_expert",
        "test_a_reshard_cuts_experts_along_their_dimension",
        "test_sinks_of_transformer_engine",
    ],
}

ID = "tp-attributes"
VARIANT = shim.plan()[ID].variant
HERE = Here(world=2, te=True)
build_gpt = testing.build_gpt
TWO = testing.Layout(tp=2)
needs_marks = pytest.mark.skipif(VARIANT == "v0_19", reason="the release marks experts itself")


# Without it 0.17 builds no model with Transformer Engine 2.5 to 2.9.
MODELS = [id for id in ("te-cpu-offload",) if shim.plan()[id].variant == "v0_17"]


def applied():
    return shim.patched(only=[ID, *MODELS], require=[ID])


def marks(build, defaults):
    """By name, the mark and the dimension of each parameter that is trained."""
    model = build()
    for weight in model.parameters() if defaults else ():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
    wrapped_and_optimizer(model)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return {
        name.rpartition(".mlp.")[2]: (
            getattr(weight, "tensor_model_parallel", False),
            getattr(weight, "partition_dim", -1),
        )
        for name, weight in trained.items()
    }


def on_two_ranks(build, defaults=False):
    try:
        return HERE.run(marks, build, defaults, layout=TWO)
    except CannotRunError as why:
        pytest.skip(str(why))


@pytest.mark.skipif(VARIANT not in LAYERS[:3], reason="the release does not mark them")
@pytest.mark.parametrize("defaults", [False, True])
def test_adapters(defaults):
    """The first factor is whole on each rank, and the second is cut."""
    with applied():
        for found in on_two_ranks(adapted, defaults):
            factors = {name.rpartition("lora.")[2]: mark for name, (mark, _) in found.items()}
            assert factors == {"down.weight": False, "up.weight": True}


@needs_marks
@pytest.mark.parametrize("defaults", [False, True])
def test_experts_that_are_cut(defaults):
    """Weights and the biases of the first layer are cut; those of the second are whole on each rank."""
    with applied():
        for found in on_two_ranks(with_experts, defaults):
            assert found["experts.up.weight0"] == found["experts.up.bias1"] == (True, 0)
            assert found["experts.down.weight1"] == (True, 1)
            assert found["experts.down.bias0"] == (False, -1)


def dimensions(etp):
    """The partition_dim of weights of row-parallel layers, once an optimizer was made: single, of a trainer, dense."""
    model = build_gpt(num_layers=1, mtp_num_layers=None, expert_tensor_parallel_size=etp).requires_grad_(False)
    options = {"config": model.config, "init_method": torch.nn.init.ones_, "bias": True, "skip_bias_add": False}
    mlp = model.decoder.layers[0].mlp
    with layers_can_be_built():
        mlp.single, mlp.corrected, mlp.dense = (
            extensions.TERowParallelLinear(32, 8, input_is_parallel=True, is_expert=is_expert, **options)
            for is_expert in (True, True, False)
        )
    before = mlp.single.weight.partition_dim
    mlp.corrected.weight.partition_dim = 1  # as slime, miles and AReaL do
    wrapped_and_optimizer(model)
    return before, *(layer.weight.partition_dim for layer in (mlp.single, mlp.corrected, mlp.dense))


@needs_marks
def test_row_parallel_experts_that_are_cut():
    with applied():
        assert HERE.run(dimensions, 2, layout=TWO) == [(0, 1, 1, 1)] * 2


def with_row_parallel_experts():
    model = build_gpt(num_layers=1, mtp_num_layers=None).requires_grad_(False)
    options = {"config": model.config, "init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": False}
    options |= {"is_expert": True, "tp_comm_buffer_name": None}
    with layers_can_be_built():
        model.experts = extensions.TERowParallelGroupedLinear(EXPERTS, 2 * HIDDEN, HIDDEN, **options)
    return model


def orthogonal_over_ranks(gradient, tp_group=None, partition_dim=None, **_):
    """Stands in for Muon's kernel: the ranks' parts are put together along the dimension, and cut again."""
    parts = [torch.empty_like(gradient) for _ in range(tp_group.size())]
    dist.all_gather(parts, gradient.contiguous(), group=tp_group)
    return orthogonal(torch.cat(parts, partition_dim)).chunk(len(parts), partition_dim)[tp_group.rank()]


def wrong_update():
    """How far a step of Muon on a row-parallel expert is from the step on the whole expert, over its norm."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    names = "emerging_optimizers" if hasattr(optimizer, "_get_megatron_emerging_optimizer") else "muon"
    module = import_module(f"megatron.core.optimizer.{names}")
    model = with_row_parallel_experts()
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    settings = {"optimizer": "muon", "lr": LR, "weight_decay": 0.0, "clip_grad": 0.0, "muon_tp_mode": "duplicated"}
    whole = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    with optimizers_of_torch(), muon() as make, mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
        made = make(optimizer.OptimizerConfig(**settings), [wrapped])
        for weight in model.experts.parameters():
            weight.main_grad.copy_(whole.chunk(2, 1)[dist.get_rank()])
        before = model.experts.weight0.detach().clone()
        with mock.patch.object(module, "newton_schulz_tp", orthogonal_over_ranks):
            made.step()
    right = -LR * orthogonal(whole).chunk(2, 1)[dist.get_rank()]
    return float((model.experts.weight0.detach() - before - right).norm() / right.norm())


@pytest.mark.skipif(not hasattr(optimizer.OptimizerConfig, "muon_tp_mode"), reason="the release has no Muon")
def test_muon_orthogonalizes_the_whole_expert():
    """Stock puts the parts of an expert together along the wrong dimension, beside Transformer Engine before 2.13."""
    with applied():
        assert max(HERE.run(wrong_update, layout=TWO)) < 1e-5


def dimension_of_a_reshard():
    """The dimension along which a plan moves a row-parallel expert from two expert-TP ranks to four."""
    from megatron.core.resharding.planner import _build_descriptors_for_param
    from megatron.core.resharding.utils import extract_param_metadata

    model = with_row_parallel_experts()
    wrapped_and_optimizer(model)
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD, ep=own, dp=own, pp=own)
    weight = model.experts.weight0
    of_two = extract_param_metadata(weight, "experts.weight0", dist.get_rank(), groups, EXPERTS)
    shape = (HIDDEN, HIDDEN // 2)
    of_four = dataclasses.replace(of_two, shape=shape, tensor_parallel_group_ranks=[0, 1, 2, 3])
    return [descriptor.dim for descriptor in _build_descriptors_for_param(of_two, of_four)]


@pytest.mark.skipif(not find_spec("megatron.core.resharding"), reason="the release reshards nothing")
def test_a_reshard_cuts_experts_along_their_dimension():
    """Stock raises "Cannot build TP descriptor" beside Transformer Engine before 2.13."""
    with applied():
        assert HERE.run(dimension_of_a_reshard, layout=TWO) == [[1], [1]]


@needs_marks
def test_row_parallel_experts_that_are_whole_keep_what_they_say():
    """Nobody reads it: no other rank has a part of them."""
    with applied():
        assert HERE.run(dimensions, 1, layout=testing.Layout(tp=2, etp=1)) == [(1, 1, 1, 1)] * 2


def build_around_experts(**options):
    """A model without experts of its own, whose config says that some are spread."""
    model = build_gpt(**options, expert_model_parallel_size=1)
    model.config.expert_model_parallel_size, model.config.expert_tensor_parallel_size = 2, 1
    return model


@needs_marks
def test_experts_that_are_spread():
    """No other rank has anything of them, so all of it counts."""
    with applied(), spread_experts(), mock.patch.object(testing, "build_gpt", build_around_experts):
        for found in on_two_ranks(with_experts):
            assert len(found) == 8
            assert all(mark for mark, _ in found.values())


class Spread(MoELayer):
    """Experts in a MoELayer that routes nothing: what is asked here are their gradients alone."""

    def __init__(self, config, experts):
        torch.nn.Module.__init__(self)
        self.config, self.experts = config, experts


def norm_and_gradient():
    """The norm that a step returns, and that of the gradients of all experts, which were other ones on each rank."""
    model = with_experts()
    mlp = model.decoder.layers[0].mlp
    mlp.experts = Spread(model.config, mlp.experts)
    wrapped, optimizer = wrapped_and_optimizer(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.main_grad.fill_(torch.distributed.get_rank() + 1)
    wrapped.finish_grad_sync()
    gradient = torch.cat([weight.main_grad.flatten() for weight in trained]).norm()
    with optimizers_of_torch():
        return float(optimizer.step()[1]), float(gradient)


@needs_marks
def test_experts_that_each_rank_has_count_once_beside_expert_grad_groups():
    """Gradients of their copies are summed by expert-grad-groups, and counted by tp-attributes: neither is enough."""
    layout, both = testing.Layout(tp=2, etp=1), [ID, "expert-grad-groups"]
    try:
        with shim.patched(only=both, require=both):
            found = HERE.run(norm_and_gradient, layout=layout)
        with shim.patched(only=both[1:], require=both[1:]):
            without_marks = HERE.run(norm_and_gradient, layout=layout)
    except CannotRunError as why:
        pytest.skip(str(why))
    assert found[0] == found[1] == pytest.approx((found[0][1],) * 2, rel=1e-6)
    assert without_marks[1][0] < 0.5 * without_marks[1][1]


# 0.12 has no such mark: it imports Transformer Engine, or raises.
class Duplicated(extensions.TERowParallelLinear if getattr(extensions, "HAVE_TE", True) else object):
    """A trainer's layer, whose mark is its own business."""


def with_own_layer():
    model = adapted()
    linear = model.decoder.layers[0].mlp.linear_fc1
    given = {"config": model.config, "init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": False}
    with layers_can_be_built():
        linear.own = Duplicated(8, 8, input_is_parallel=True, is_expert=False, **given)
    linear.own.weight.sequence_parallel = False
    return model


def test_a_trainers_own_layer_stays():
    with applied():
        for found in on_two_ranks(with_own_layer):
            assert found["linear_fc1.own.weight"] == (True, 1)


def with_sinks():
    """Transformer Engine's attention asks for a GPU in many ways, so this one is not initialised."""
    model = adapted()
    attention = extensions.TEDotProductAttention.__new__(extensions.TEDotProductAttention)
    torch.nn.Module.__init__(attention)
    # Some releases of Transformer Engine register parameters in a way of their own, which needs their constructor.
    attention._parameters["softmax_offset"] = torch.nn.Parameter(torch.zeros(2))
    model.decoder.layers[0].mlp.attention = attention
    return model


@pytest.mark.skipif(VARIANT == "v0_12", reason="this release has no attention sinks")
def test_sinks_of_transformer_engine():
    with applied():
        for found in on_two_ranks(with_sinks):
            assert found["attention.softmax_offset"] == (True, 0)
