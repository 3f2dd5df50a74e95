"""A run that meets no defect has stock's bits under all default patches: its weights, gradients and states.

Adapters are those of shim.testing.add_lora, around the layers that mcore-bridge adapts.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
from mamba_mixer import Mixer
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from thorough import in_full
from trainings import EXPERTS, TRAININGS, Training, trained

import shim
from shim import testing
from shim.patches.megatron_core import _proof_mla
from shim.patches.megatron_core._proof_optimizer_resume import Training as Resuming
from shim.patches.megatron_core._proof_optimizer_resume import fused_adam
from shim.testing.proof import on_device

CELLS = {"0.19.2": "all"}
ABOUT = []

STEPS, SAVED_AT = 5, 2


def hybrid(**options):
    return testing.build_hybrid("M*-M-", mixer=Mixer, **options)


def resumed_hybrid(num_layers, mtp_num_layers, **options):
    return hybrid(**options)


def adapted(**options):
    """A GPT model of which only low-rank adapters are trained."""
    model = testing.build_gpt(mtp_num_layers=None, **options)
    testing.add_lora(model)
    return model


def latent(**options):
    return testing.build_gpt(mtp_num_layers=None, **MLA, **options)


def duplicated(**options):
    """Multi-latent attention whose down projections every rank has whole, as in specs of Transformer Engine."""
    local = gpt_layer_specs.get_gpt_layer_local_spec

    def spec(**given):
        made = local(**given)
        parts = made.submodules.self_attention.submodules
        parts.linear_q_down_proj = parts.linear_kv_down_proj = _proof_mla.Duplicated
        return made

    with mock.patch.object(gpt_layer_specs, "get_gpt_layer_local_spec", spec):
        return latent(**options)


MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "num_query_groups": None,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}
HALF = {"bf16": True, "params_dtype": torch.bfloat16}
TP_2, TP_2_SP = testing.Layout(tp=2), testing.Layout(tp=2, sequence_parallel=True)
MTP = {"mtp_num_layers": 1}
# Those of TRAININGS whose numbers stock has right on every release that can do them at all.
RIGHT = ["dense", "experts", "TP 2, distributed optimizer", "EP 2", "packed", "recompute", "multi-token prediction"]
CASES = {
    **{name: TRAININGS[name] for name in RIGHT},
    "TP 2, SP": replace(TRAININGS["TP 2, SP"], options={}),
    "dense in bf16": replace(TRAININGS["dense"], optimizer="distributed", options=HALF),
    "TP 2 in bf16": replace(TRAININGS["TP 2, distributed optimizer"], options=HALF),
    "swiglu, qk norm": replace(
        TRAININGS["dense"],
        options={"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "qk_layernorm": True},
    ),
    "MLA of whole projections, TP 2, SP": Training(layout=TP_2_SP, optimizer="plain", build=duplicated),
    "multi-token prediction": replace(TRAININGS["multi-token prediction"], optimizer="plain"),
    "multi-token prediction, TP 2 in bf16": Training(layout=TP_2, optimizer="distributed", options=HALF | MTP),
    "experts, TP 2, SP in bf16": Training(layout=TP_2_SP, optimizer="distributed", options=HALF | EXPERTS),
}
for kind, build in {"MLA": latent, "hybrid": hybrid, "LoRA": adapted}.items():
    CASES[kind] = Training(optimizer="plain", build=build)
    CASES[f"{kind}, TP 2 in bf16"] = Training(layout=TP_2, optimizer="distributed", options=HALF, build=build)
    CASES[f"{kind} in bf16"] = replace(CASES[f"{kind}, TP 2 in bf16"], layout=testing.Layout())
    CASES[f"{kind}, TP 2"] = replace(CASES[kind], layout=TP_2)
for kind, options in {"multi-token prediction": MTP, "experts": EXPERTS}.items():
    CASES[f"{kind} in bf16"] = Training(optimizer="distributed", options=HALF | options)
CASES["multi-token prediction, TP 2"] = Training(layout=TP_2, optimizer="plain", options=MTP)
CASES["experts, TP 2, SP"] = Training(layout=TP_2_SP, optimizer="plain", options=EXPERTS)
EVERY_DAY = {
    *("packed", "recompute", "multi-token prediction", "swiglu, qk norm", "TP 2, SP", "MLA, TP 2"),
    *(f"{name} in bf16" for name in ("LoRA", "hybrid, TP 2", "experts, TP 2, SP")),
}

# In 0.16 and 0.20 stock raises without Transformer Engine. With these it builds the layers, and so has bits.
BUILDS = [id for id in ("moe-without-te", "mla-without-te", "mtp-without-te") if shim.plan()[id].wanted]
# What stock trains wrong, and by what it is compared: one rank is the truth of that patch's proof.
WRONG = {name: "mla-rope-key-gradient" for name in CASES if name.startswith("MLA, TP 2")}


class StockError(Exception):
    """Stock cannot do it here."""


def of_stock(function, *args):
    try:
        return function(*args)
    except Exception as error:
        raise StockError from error


def run(pool, *args):
    """On all ranks. Skips what stock 0.12 and 0.13 cannot do with this torch; nothing is skipped on later releases."""
    try:
        return pool.run(*args)
    except testing.RankError as error:
        if error.exception_type == "StockError" and testing.release().startswith(("0.12.", "0.13.")):
            pytest.skip("stock raises")
        raise


def weights(name, arguments):
    whole = _proof_mla.without_te() if CASES[name].build is duplicated else contextlib.nullcontext()
    with shim.patched(**arguments), whole:
        return trained(CASES[name], STEPS)


def differing(name, stock, arguments):
    """What differs on this rank between a few patches, `stock`, and those of the arguments, by name."""
    one, other = of_stock(weights, name, {"only": stock}), weights(name, arguments)
    assert one.keys() == other.keys() and any(value.any() for value in one.values())
    return [key for key in one if not torch.equal(one[key], other[key])]


def named(cases, every_day):
    return [pytest.param(name, marks=() if name in every_day else in_full) for name in cases]


@pytest.mark.parametrize("name", named(CASES, EVERY_DAY))
def test_all_patches_leave_stocks_bits(name, ranks):
    pool, none = ranks[CASES[name].layout.world], [[]] * CASES[name].layout.world
    if name not in WRONG:
        assert run(pool, differing, name, BUILDS, {}) == none
        return
    fix = WRONG[name]
    assert run(pool, differing, name, [*BUILDS, fix], {}) == none
    assert run(pool, differing, name, BUILDS, {"only": [*BUILDS, fix]}) != none


# Formats of the distributed optimizer's state in a checkpoint; 0.14 has an older one. In fp32 stock cannot load
# dp_reshardable, which dp-reshardable-fp32 fixes.
BY_DATA, FULLY = (
    {"distrib_optim_sharding_type": form if hasattr(DistributedOptimizer, f"sharded_param_state_{form}") else older}
    for form, older in dict.fromkeys(("dp_reshardable", "fully_reshardable"), "fully_sharded_model_space").items()
)
RESUMED = {
    "dense": (1, FULLY, {}),
    "dense in bf16": (1, BY_DATA, {"bf16": True}),
    "experts in bf16": (1, BY_DATA, {"num_moe_experts": 2, "bf16": True}),
    "MLA": (1, FULLY, MLA),
    "LoRA": (1, FULLY, {"lora": True}),
    "LoRA, TP 2 in bf16": (2, BY_DATA, {"bf16": True, "lora": True}),
    "TP 2": (2, FULLY, {}),
    "hybrid, TP 2 in bf16": (2, BY_DATA, {"hybrid": True, "bf16": True}),
    "multi-token prediction, TP 2 in bf16": (2, BY_DATA, {"bf16": True, **MTP}),
    "hybrid": (1, FULLY, {"hybrid": True}),
    "multi-token prediction": (1, FULLY, MTP),
    "MLA in bf16": (1, BY_DATA, {"bf16": True, **MLA}),
    "experts": (1, FULLY, {"num_moe_experts": 2}),
}
RESUMED_EVERY_DAY = {"experts in bf16", "LoRA, TP 2 in bf16", "hybrid, TP 2 in bf16"}


def resumed(name, directory, arguments):
    """The weights and states of the optimizer after some steps, a checkpoint by dist_checkpointing, and the others."""
    world, form, settings = RESUMED[name]
    # One bucket: of several, fully_reshardable loses parts, which reshardable-padding fixes.
    settings = {"metadata": form, "bucket": None, "saved": False, **settings}
    directory.mkdir(exist_ok=True)
    build = resumed_hybrid if settings.pop("hybrid", False) else testing.build_gpt
    built = mock.patch.object(testing, "build_gpt", build)
    with shim.patched(**arguments), on_device("cpu", te=False), built:
        with testing.layout_initialised(testing.Layout(tp=world)), fused_adam():
            Resuming(**settings).train(SAVED_AT).save(str(directory))
            training = Resuming(seed=8, **settings).load(str(directory)).train(STEPS - SAVED_AT)
            return [*training.weights(), *(value for state in training.states() for value in state.values())]


def differing_resumed(name, directory):
    stock = of_stock(resumed, name, directory / "stock", {"only": BUILDS})
    found = resumed(name, directory / "patched", {})
    assert len(stock) == len(found) > 0
    return sum(not torch.equal(one, other) for one, other in zip(stock, found, strict=True))


@pytest.mark.parametrize("name", named(RESUMED, RESUMED_EVERY_DAY))
def test_a_training_that_is_saved_and_loaded_has_stocks_bits(name, ranks, tmp_path):
    world = RESUMED[name][0]
    assert run(ranks[world], differing_resumed, name, tmp_path) == [0] * world


@pytest.mark.once
def test_the_comparison_sees_a_change_of_rounding(ranks):
    """With rounding=True the losses of chunked-logprob are as exact, and round in another order."""
    (said,) = run(ranks[1], differing, "dense", [], {"rounding": True})
    assert said
