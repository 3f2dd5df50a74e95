"""frozen-expert-bias: a bias stays if its router is frozen, and moves as on stock if the router is trained."""

import copy
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.moe import moe_utils
from torch.distributed import ProcessGroup
from uncompiled import inside

import shim
from shim import testing
from shim.patches.megatron_core.frozen_expert_bias.proof import MODEL, QUANTILE, step
from shim.testing import Layout
from shim.testing.schedules import mean_of_row, run_microbatches

CELLS = {"0.12.0": "all"}

ID = "frozen-expert-bias"
NEEDED = shim.plan()[ID].wanted
pytestmark = [
    pytest.mark.skipif(not NEEDED, reason="this release needs no patch"),
    pytest.mark.usefixtures("uncompiled"),
]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS, TOKENS = 4, 16


class RouterWithAdapter(torch.nn.Module):
    """A frozen router whose logits get those of a trained adapter. The classes of both bridges hold them like this."""

    def __init__(self, router, name):
        super().__init__()
        self.name = name
        setattr(self, name, router)
        self.adapter = torch.nn.Linear(router.weight.shape[1], router.weight.shape[0], bias=False)

    def forward(self, states, *args, **kwargs):
        router = getattr(self, self.name)
        gating = router.gating
        with mock.patch.object(router, "gating", lambda states: gating(states) + self.adapter(states)):
            return router(states, *args, **kwargs)


class SavedModule(torch.nn.Module):
    """A frozen module and its trained copy, which runs and whose attributes are read: peft's modules_to_save."""

    def __init__(self, module):
        super().__init__()
        with mock.patch.dict(copy._deepcopy_dispatch, {ProcessGroup: lambda group, _: group}):
            self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module).requires_grad_(True)})
        self.original_module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save["default"], name)

    def forward(self, *args, **kwargs):
        return self.modules_to_save["default"](*args, **kwargs)


def applied(*others):
    return shim.patched(only=[ID, *others], require=[ID])


def with_lora(**options):
    """A model of two layers with experts, whose weights are all frozen but for those of adapters."""
    model = testing.build_gpt(**{**MODEL, "num_layers": 2, **options})
    testing.add_lora(model)
    return model


def routers(model):
    return [layer.mlp.router for layer in model.decoder.layers]


def wrapped(model):
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def biases(model, steps=2, bias="expert_bias"):
    """The biases of the routers after some steps."""
    whole = wrapped(model)
    for _ in range(steps):
        step(whole)
    return [getattr(router, bias).clone() for router in routers(model)]


def first_trained(**options):
    model = with_lora(**options)
    routers(model)[0].weight.requires_grad_(True)
    return model


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recompute"])
def test_a_frozen_bias_stays_and_a_trained_one_moves_as_on_stock(options):
    """Counts begin anew with each step, also those of the frozen router. Recompute of LoRA needs another patch."""
    with shim.patched(only=["frozen-recompute"]):
        stock = biases(first_trained(**options))
    with applied("frozen-recompute"):
        model = first_trained(**options)
        trained, frozen = biases(model)
    assert stock[0].any() and stock[1].any()
    assert torch.equal(trained, stock[0]) and not frozen.any()
    assert not any(router.local_tokens_per_expert.any() for router in routers(model))


def test_a_bias_that_is_loaded_keeps_every_bit():
    with applied():
        model = with_lora()
        given = torch.linspace(-0.123, 0.456, MODEL["num_moe_experts"])
        for router in routers(model):
            router.expert_bias.copy_(given)
        assert all(torch.equal(found, given) for found in biases(model))


def test_full_fine_tuning_with_a_frozen_router():
    """Only the routers are frozen. Gradients are those of stock, since the bias is the same in the first step."""

    def trained():
        model = testing.build_gpt(**{**MODEL, "num_layers": 2})
        for router in routers(model):
            router.weight.requires_grad_(False)
        whole = wrapped(model)
        step(whole)
        grads = {name: weight.main_grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
        return grads, [router.expert_bias for router in routers(model)]

    stock, moved = trained()
    with applied():
        found, stayed = trained()
    assert all(bias.any() for bias in moved) and not any(bias.any() for bias in stayed)
    assert found.keys() == stock.keys() and all(torch.equal(found[name], stock[name]) for name in stock)


def test_full_fine_tuning_is_as_on_stock():
    stock = biases(testing.build_gpt(**{**MODEL, "num_layers": 2}))
    with applied():
        found = biases(testing.build_gpt(**{**MODEL, "num_layers": 2}))
    assert stock[0].any() and all(map(torch.equal, found, stock))


@pytest.mark.parametrize("name", ["base_layer", "to_wrap"], ids=["mcore-bridge", "Megatron-Bridge"])
def test_an_adapter_around_the_router_does_not_hold_its_bias_either(name):
    def bias():
        model = with_lora()
        router = routers(model)[0]
        model.decoder.layers[0].mlp.router = RouterWithAdapter(router, name)
        step(wrapped(model))
        assert model.decoder.layers[0].mlp.router.adapter.weight.main_grad.any(), "the adapter is trained"
        return router.expert_bias

    assert bias().any()
    with applied():
        assert not bias().any()


def test_a_router_in_modules_to_save_still_moves():
    """Its copy, as on stock. The frozen original has no tokens."""

    def saved():
        model = with_lora()
        both = model.decoder.layers[0].mlp.router = SavedModule(routers(model)[0])
        step(wrapped(model))
        return both.modules_to_save["default"].expert_bias, both.original_module.expert_bias

    stock, _ = saved()
    with applied():
        found, original = saved()
    assert stock.any() and torch.equal(found, stock) and not original.any()


@pytest.mark.parametrize("flag", [True, False])
def test_the_flag_of_0_19(flag):
    """True holds the bias of a trained router, in all releases. False, upstream's default, frees no frozen one."""
    with applied():
        model = first_trained()
        for router in routers(model):
            router.frozen_expert_bias = flag
        trained, frozen = biases(model)
    assert trained.any() != flag and not frozen.any()


def test_quantile_balancing():
    """0.19 moves another buffer under it, which its flag does not hold."""
    if not hasattr(routers(with_lora())[0], "qb_beta"):
        pytest.skip("this release has no quantile balancing")
    stock = biases(first_trained(**QUANTILE), bias="qb_beta")
    with applied():
        trained, frozen = biases(first_trained(**QUANTILE), bias="qb_beta")
    assert stock[0].any() and stock[1].any()
    assert torch.equal(trained, stock[0]) and not frozen.any()


def on_ranks(layout, trained):
    """The biases of this rank's routers after two steps of LoRA. trained: the layers whose routers are trained."""
    with inside(layout), applied():
        # 0.12 does not train tied embeddings on two stages, if they are frozen.
        model = with_lora(moe_token_dispatcher_type="allgather", share_embeddings_and_output_weights=False)
        first = model.decoder.layers[0].layer_number - 1
        mine = routers(model)
        for number, router in enumerate(mine, first):
            router.weight.requires_grad_(number in trained)
        whole = wrapped(model)
        model.config.finalize_model_grads_func = finalize_model_grads
        rows = torch.randint(0, 64, (ROWS, 1, TOKENS), generator=torch.Generator().manual_seed(0))
        rows = rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        # 0.16 looks it up in every step, and has it with Transformer Engine only.
        with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
            for _ in range(2):
                whole.zero_grad_buffer()
                run_microbatches(whole, list(rows), mean_of_row, TOKENS)
        return {number: router.expert_bias.clone() for number, router in enumerate(mine, first)}


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("trained", [(), (0,)], ids=["none", "the first"])
def test_on_two_ranks_a_bias_is_that_of_one(ranks2, layout, trained):
    """With experts on both ranks, and with a stage whose routers are all frozen beside one whose router is trained."""
    alone = on_ranks(Layout(), trained)
    assert [bool(alone[number].any()) for number in (0, 1)] == [0 in trained, False]
    for found in ranks2.run(on_ranks, layout, trained):
        assert found and all(torch.equal(bias, alone[number]) for number, bias in found.items())


class Balance(torch.nn.Module):
    """A bias and its counts in a module without weights."""

    def __init__(self, experts):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("local_tokens_per_expert", torch.zeros(experts), persistent=False)


def test_check_says_which_bias_would_move(caplog):
    """No weight says whether its router is frozen, so it moves as on stock, unless the flag of 0.19 is set."""
    with shim.patched(only=[ID]):
        model = with_lora()
        assert shim.check(model)[ID].state == "applied"
        routers(model)[1].text = Balance(MODEL["num_moe_experts"])
        found = shim.check(model)[ID]
        assert found.state == "inactive"
        assert "expert_bias of decoder.layers.1.mlp.router.text moves in every step" in found.reason
        assert found.reason in caplog.text
        routers(model)[1].text.frozen_expert_bias = True
        assert shim.check(model)[ID].state == "applied"
        routers(model)[1].text.local_tokens_per_expert[0] = 1
        assert not biases(model)[1].any() and not routers(model)[1].text.expert_bias.any()
        del routers(model)[1].text.frozen_expert_bias
        model.requires_grad_(True)
        assert shim.check(model)[ID].state == "applied", "without a frozen weight each bias is to move"
