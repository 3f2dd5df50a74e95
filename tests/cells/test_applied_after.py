"""shim.apply() after the model was built: it trains as one that was built while shim was applied, to the bit."""

import functools
import importlib
import types

import moe_cases
import pytest
import torch
from megatron.core.transformer.moe import moe_utils

import shim
from shim import testing
from shim._engine.names import unwrap
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ABOUT = []  # the patches, see chosen.py

# The package has a function of the same name.
finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
EXPERTS = {"num_moe_experts": 2, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    with testing.layout_initialised(Layout()):
        yield


def built(lora=False, **options):
    model = testing.build_gpt(**options)
    if lora:
        testing.add_lora(model)
    return model


def row():
    return testing.pack(testing.random_sequences((5, 7, 4)), align=4)


def gradients(model):
    """Of a step on a padded row, with all losses."""
    found = testing.run_packed(model, row())
    return [found.main, *found.mtp, *found.grads.values()]


def with_padding_mask(model):
    """Of a step on an unpacked row that ends in padding: the tokens that the router counts."""
    tokens = torch.arange(6)[None]
    model(tokens, tokens, None, labels=tokens, padding_mask=tokens > 3).mean().backward()
    return [model.decoder.layers[0].mlp.router.local_tokens_per_expert, *(w.grad for w in model.parameters())]


def overridden(model):
    """A step whose recompute comes after the block that sets a field of the config."""
    given = row()
    calls = []
    layer = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.tensor(model.config.layernorm_epsilon)))
    inputs = {"input_ids": given.input_ids, "position_ids": given.position_ids, "attention_mask": None}
    with shim.config_override(model.config, layernorm_epsilon=0.5):
        loss = model(**inputs, labels=given.labels, packed_seq_params=given.packed_seq_params())
    loss.mean().backward()
    return calls


def on_logits(model):
    """Which logits autograd keeps: the loss of the patch keeps them as they are, in their own dtype."""
    kept = []
    given = row()
    inputs = {"input_ids": given.input_ids, "position_ids": given.position_ids, "attention_mask": None}
    packed = {"packed_seq_params": given.packed_seq_params()}
    with torch.no_grad():
        logits = model(**inputs, **packed)
    logits = logits.transpose(0, 1).to(torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.dtype) or tensor, lambda t: t):
        loss = model.compute_language_model_loss(given.labels, logits)
    loss.mean().backward()
    half = sum(dtype is torch.bfloat16 for dtype in kept)
    return [torch.tensor(half), logits.grad]


NEEDS = {  # the patch -> first release, options of the model, and the step
    "mtp-packed-sequences": ((0, 12), {}, gradients),
    "mtp-recompute": ((0, 12), {**FULL, "recompute_num_layers": 2, "mtp_num_layers": 2}, gradients),
    "frozen-recompute": ((0, 12), {"lora": True, "mtp_num_layers": None, **FULL, "recompute_num_layers": 1}, gradients),
    "fp8-fp4-recompute": ((0, 13), {"mtp_num_layers": None, **NORMS}, gradients),
    "expert-bias-padding": ((0, 16), {"mtp_num_layers": None, **EXPERTS}, with_padding_mask),
    "config-override": ((0, 12), {"mtp_num_layers": None, **FULL, "recompute_num_layers": 1}, overridden),
    "chunked-logprob": ((0, 12), {"mtp_num_layers": None}, on_logits),
}


def outcome(step, model):
    """What the step returns; the error of a release that cannot do it."""
    try:
        return step(model)
    except (RuntimeError, TypeError, AssertionError, NameError, shim.ShimError) as error:
        return type(error)


def same(one, other):
    lists = isinstance(one, list) and isinstance(other, list)
    return one == other if not lists else len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("id", NEEDS)
def test_a_model_that_was_built_before_trains_like_one_built_after(id):
    since, options, step = NEEDS[id]
    if since > VERSION or shim.plan()[id].action in ("upstream", "not-needed"):
        pytest.skip("this release needs no patch")
    only = [id] if id != "mtp-recompute" else [id, "mtp-packed-sequences"]  # stock packs no row before 0.16
    before, stock = built(**options), built(**options)
    without = outcome(step, stock)
    with shim.patched(only=only, require=only):
        after = built(**options)
        report = shim.check(before)
        assert report[id].state == "applied" and not report[id].others
        fixed = outcome(step, before)
        assert isinstance(fixed, list) and same(fixed, outcome(step, after))
    assert not same(without, fixed), "stock does the same"


# What a model holds, for the patches that no model on CPU shows


def held_by(roots):
    """Functions reached from instances: by attributes, containers, closures, defaults, bound methods and partials."""
    seen, left, functions = set(), list(roots), {}
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, torch.Tensor, str, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            functions[id(value)] = value
            left += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for cell in value.__closure__ or ():
                left += [cell.cell_contents] if cell != types.CellType() else []
        elif isinstance(value, types.MethodType):
            left += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        else:
            left += vars(value).values() if hasattr(value, "__dict__") else ()
    return functions


def stock_functions(report):
    """Upstream's own functions, of all that is bound."""
    from shim._engine.engine import ENGINE

    assert report.applied
    return [unwrap(chain.base) for chain in ENGINE.binder.chains.values()]


MODELS = {
    "mtp": {},
    "experts": {"mtp_num_layers": None, **EXPERTS},
    "recompute": {**FULL, "recompute_num_layers": 1},
    "norms": {"mtp_num_layers": None, **NORMS},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_no_model_of_a_release_holds_a_function_that_is_bound_later(options):
    model = built(**options)
    with shim.patched() as report:
        bound = stock_functions(report)
        found = held_by([model])
        assert found, "hooks and the functions of the config at the least"
        assert not [function for function in bound if id(function) in found]
        held = next(function for function in bound if isinstance(function, types.FunctionType))
        model.config.finalize_model_grads_func = functools.partial(held)
        assert id(held) in held_by([model]), "the search sees no function of a config"


@pytest.mark.skipif(moe_cases.NOT_TOLD, reason="experts of 0.12.0 are not told which rows are padding")
def test_experts_that_were_built_before_are_stashed():
    """And check() names the function for the end of a step, which trainers put into the config."""
    module = finalize_model_grads
    model = moe_cases.build()
    plain = [moe_cases.train(model, number) for number in range(3)]
    model.config.finalize_model_grads_func = module.finalize_model_grads
    with moe_cases.patched(), moe_cases.stashing(model):
        assert [moe_cases.train(model, number) for number in range(3)] == plain  # the first step sizes the pools
        assert moe_cases.statistics().stashed > 0
        found = shim.check(model)["paged-stash"]
        assert found.state == "unknown" and "config.finalize_model_grads_func" in found.reason, str(found)
        model.config.finalize_model_grads_func = module.finalize_model_grads
        assert shim.check(model)["paged-stash"].state == "applied"
