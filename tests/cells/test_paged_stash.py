"""Patch paged-stash on the experts of a real MoE model: no bit of losses and gradients changes, memory falls.

Upstream's own functions, which lead to the same stash from 0.18 on, are in test_paged_stash_manager. Most tests compare
steps of one model with the same steps without stash. In the first one a stash learns its size and keeps all originals.
"""

import gc
import logging
import os
import weakref
from functools import reduce
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import megatron.core.transformer.moe.experts as upstream_experts
import moe_cases as cases
import pytest
import torch
from megatron.core.transformer.mlp import MLP
from moe_cases import DROPLESS, HOST_ONLY, ID, NOT_TOLD, build, experts_of, stashing, statistics, train
from recompute_cases import all_pairs

import shim
from shim import testing
from shim.testing import Layout

CELLS = {
    "0.13.1": "all",
    "0.19.2": [
        "test_an_activation_that_upstream_has_compiled_is_known",
        "test_together_with_fine_grained_offloading_of_other_modules",
    ],
}

RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
OTHERS = {
    "plain": {},
    "bfloat16": cases.BFLOAT16,
    "shared experts": {"moe_shared_expert_intermediate_size": 24},
    "not gated": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
}
TRAINED = "all", "adapters", "router"
CASES = all_pairs(factor=(2.0, 1.5), topk=(1, 2), policy=("probs", "position"), other=OTHERS, trained=TRAINED)
RECOMPUTED = all_pairs(recompute=RECOMPUTE, other=("bfloat16", "shared experts"), trained=TRAINED)

if_there_is_a_patch = pytest.mark.skipif(NOT_TOLD, reason="experts of 0.12.0 are not told which rows are padding")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


@pytest.fixture(scope="module")
def applied():
    """The patch, once for all tests that want nothing but its default options. All others come first."""
    if NOT_TOLD:
        pytest.skip("experts of 0.12.0 are not told which rows are padding")
    with cases.patched() as report:
        yield report


def changing_nothing(model, numbers=(0, 1), **values):
    """What was counted up to the end of each step, of which none is other than it is without stash."""
    plain, counted = [train(model, number) for number in numbers], []
    with stashing(model, **values):
        for number, expected in zip(numbers, plain, strict=True):
            assert train(model, number) == expected
            counted.append(statistics())
    assert not any(map(pages_taken, counted))
    return counted


def pages_taken(counted):
    return sum(pool.wanted for pool in counted.pools)


# What there is without the patch


def test_0_12_0_is_left_alone():
    """Nobody could tell which rows of its experts are padding."""
    if not NOT_TOLD:
        pytest.skip("the patch is there from 0.12.1 on")
    model, before = build(), (upstream_experts.SequentialMLP.forward, MLP.forward)
    plain = [train(model, number) for number in range(2)]
    with shim.patched(only=[ID], options={ID: OPTIONS}) as report, cases.flags([model]):
        assert report[ID].state in ("upstream", "not-needed")
        assert before == (upstream_experts.SequentialMLP.forward, MLP.forward)
        assert [train(model, number) for number in range(2)] == plain


@if_there_is_a_patch
@pytest.mark.parametrize(("factor", "topk"), [(2.0, 2), (2.0, 1), (1.5, 2), (1.5, 1)])
def test_buffers_have_rows_without_a_token_and_tokens_are_dropped(factor, topk):
    """Otherwise the tests would say less. And no weight has as many rows or columns as a buffer has rows."""
    model = build(moe_expert_capacity_factor=factor, moe_router_topk=topk)
    sizes = {size for expert in experts_of(model) for weight in expert.parameters() for size in weight.shape}
    with cases.buffers(model) as found:
        for microbatch in range(4):
            cases.forward(model, microbatch)
    assert {rows for rows, _ in found}.isdisjoint(sizes)
    assert any(0 < valid < rows for rows, valid in found)
    dropped = 4 * 2 * cases.TOKENS * topk - sum(valid for _, valid in found)
    assert dropped > 0 or factor == 2.0


# With options of their own, and the end of it


OPTIONS = {"moe_paged_stash": True, "moe_paged_stash_page_size": 5, "moe_paged_stash_buffer_size_factor_cuda": -1.0}


@if_there_is_a_patch
def test_an_overflow_that_is_not_possible_is_an_error():
    with pytest.raises(shim.ShimError, match="overflow is 'drop'; it must be one of keep, spill, raise"):
        shim.apply(only=[ID], options={ID: {"overflow": "drop"}})
    shim.revert()


@if_there_is_a_patch
def test_options_count_where_nobody_has_set_the_config():
    """Also on 0.18 and 0.19, where the fields are always there; on all releases a config wins that somebody has set."""
    model = build()
    plain = [train(model, number) for number in range(2)]
    with cases.patched(**OPTIONS):
        assert [train(model, number) for number in range(2)] == plain
        assert statistics().stashed > 0
        assert {pool.page_size for pool in statistics().pools} == {5}
        assert all(pool.pages == pool.most_wanted for pool in statistics().pools)  # the factor, too
        with stashing(model, page_size=3):
            assert [train(model, number) for number in range(2)] == plain
            assert {pool.page_size for pool in statistics().pools} == {3}


HOST_FACTOR = "moe_paged_stash_buffer_size_factor_cpu"


@if_there_is_a_patch
def test_a_host_pool_by_option_is_one():
    model = build()
    plain = train(model)
    options = {**OPTIONS, "moe_paged_stash_buffer_size_factor_cuda": 0.0, HOST_FACTOR: -1.0, "overflow": "spill"}
    with cases.patched(**options):
        shim.check(model)
        assert [train(model) for _ in range(3)] == [plain] * 3
        assert statistics().spilled > 0 and statistics().stashed == 0


@if_there_is_a_patch
@pytest.mark.parametrize(
    "options, values, message",
    [
        ({"overflow": "spill"}, {}, f"needs a host pool, and there is none. Remedy: set {HOST_FACTOR}"),
        ({}, {"page_size": -1}, "page_size is -1"),
        ({}, {"buffer_size_factor_cuda": float("nan")}, "factor_cuda is nan"),
    ],
    ids=["spill", "page_size", "factor"],
)
def test_check_refuses_what_cannot_work(options, values, message):
    """Only the model knows its config; whoever does not ask is told in the first forward."""
    model = build()
    with cases.patched(**options), stashing(model, **values):
        for ask in (shim.check, train):
            with pytest.raises(shim.ShimError, match=message):
                ask(model)


@if_there_is_a_patch
def test_check_says_what_leaves_nothing_to_stash():
    model = build(**DROPLESS)
    with shim.patched(only=[ID]), cases.flags([model]):
        found = shim.check(model)[ID]
        assert found.state == "inactive" and "no spare rows" in found.reason


@if_there_is_a_patch
def test_check_says_why_nothing_is_stashed():
    model, dense = build(), testing.build_gpt(mtp_num_layers=None)
    with shim.patched(only=[ID]):
        found = shim.check(model)[ID]
        assert found.state == "inactive" and found.reason == "moe_paged_stash is not set"
        assert "moe_paged_stash" in found.remedy
        with cases.flags([model]):
            assert shim.check(model)[ID].state == "applied"
            found = shim.check(dense)[ID]
            assert found.state == "inactive" and found.reason == "the model has no experts"
    with cases.patched(moe_paged_stash=True):
        assert shim.check([dense, model])[ID].state == "applied"
    with cases.patched(), pytest.raises(shim.NotMetError, match="moe_paged_stash is not set"):
        shim.check(model)


@if_there_is_a_patch
def test_where_nothing_is_kept_an_overflow_is_an_error_before_gradients_are_used():
    """But for the first step, which has no pages and learns how many it takes."""
    model = build()
    plain = train(model)
    with cases.patched(overflow="raise"):
        with stashing(model, buffer_size_factor_cuda=0.2):
            assert train(model) == plain
            for _ in range(2):
                with pytest.raises(shim.ShimError, match="gradients since the last check are wrong"):
                    train(model)
        with stashing(model, buffer_size_factor_cuda=-1.0):
            assert [train(model) for _ in range(3)] == [plain] * 3


@if_there_is_a_patch
def test_what_is_not_kept_spills():
    model = build()
    plain = train(model)
    with cases.patched(overflow="spill"), stashing(model, buffer_size_factor_cuda=0.2, buffer_size_factor_cpu=-1.0):
        assert [train(model) for _ in range(3)] == [plain] * 3
        assert statistics().stashed > 0 and statistics().spilled > 0


def target_of(name):
    module, _, path = name.partition(":")
    return reduce(lambda owner, part: vars(owner)[part], path.split("."), import_module(module))


@if_there_is_a_patch
def test_functions_and_memory_are_given_back():
    with cases.patched() as report:
        names = list(report[ID].targets)
    model, originals = build(), {name: target_of(name) for name in names}
    with cases.patched(), stashing(model):
        assert all(target_of(name) is not original for name, original in originals.items())
        assert train(model) == train(model)
        pools = [weakref.ref(pool.data) for pool in cases.pools()]
        assert statistics().stashed > 0
        kept = list(cases.pools())
        assert [text for text in shim.status()[ID].holds if "pools of pages" in text]
    assert kept and all(pool.pages == 0 for pool in kept) and shim.status()[ID].holds == ()
    del kept
    gc.collect()
    assert all(target_of(name) is original for name, original in originals.items())
    assert pools and all(data() is None for data in pools)


# No bit changes


def model_of(factor=2.0, topk=2, policy="probs", other="plain", trained="all", recompute=None):
    model = build(
        moe_expert_capacity_factor=factor,
        moe_router_topk=topk,
        moe_token_drop_policy=policy,
        **OTHERS[other],
        **RECOMPUTE.get(recompute, {}),
    )
    if trained == "adapters":
        testing.add_lora(model)
    if trained == "router":
        for name, weight in model.named_parameters():
            weight.requires_grad_("router" in name)
    if trained != "all":  # as trainers do: otherwise what is recomputed trains nothing
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return model


def name_of(case):
    return "-".join(map(str, case.values()))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_stash_changes_no_bit(applied, case):
    first, second = changing_nothing(model_of(**case))
    assert first.kept > first.stashed  # which it is only where an expert has no token
    assert first.stashed < second.stashed


@pytest.mark.skipif(cases.VERSION < (0, 19), reason="the same on all releases, and it takes a compiler")
def test_an_activation_that_upstream_has_compiled_is_known(applied):
    activations = import_module("megatron.core.activations")
    model = build(gated_linear_unit=False, activation_func=activations.squared_relu)
    _, last = changing_nothing(model)
    assert last.stashed > 0 and not any("torch.compile" in reason for reason in last.skipped)


@pytest.mark.parametrize("case", RECOMPUTED, ids=name_of)
def test_recomputed_experts_are_left_alone(applied, case):
    """Backward uses at once what is saved then."""
    _, last = changing_nothing(model_of(**case))
    assert last.stashed == last.kept == 0
    assert any("recomputed" in reason for reason in last.skipped)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "dropless"])
def test_applying_probs_on_input(applied, padded):
    """Rows that fill the capacity then have a part in gradients; where there are none, a host pool takes all rows."""
    model = build(moe_router_topk=1, moe_apply_probs_on_input=True, **({} if padded else DROPLESS))
    _, last = changing_nothing(model, **({} if padded else HOST_ONLY))
    if padded:
        assert last.stashed == last.kept == 0
        assert any("moe_apply_probs_on_input" in reason for reason in last.skipped)
    else:
        assert last.spilled > 0


# Any order of steps


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_evaluation_at_any_time(applied, grad):
    """Before the first step and between steps; a graph that never sees a backward leaves nothing behind."""
    model = build()
    plain = [train(model, number) for number in range(3)]
    with stashing(model):
        for number, expected in enumerate(plain):
            before = statistics()
            model.eval()
            with torch.set_grad_enabled(grad):
                for microbatch in range(2):
                    cases.forward(model, 1000 + microbatch)
            model.train()
            found = statistics()
            assert grad == ((found.stashed, found.kept) != (before.stashed, before.kept))
            cases.forget(model)
            assert not pages_taken(statistics())
            assert train(model, number) == expected
        assert statistics().stashed > before.stashed > 0


def test_the_number_of_microbatches_may_change(applied):
    """The stash grows to the most that there was."""
    model, numbers = build(), (1, 1, 3, 3, 2)
    plain = [train(model, 7, microbatches) for microbatches in numbers]
    kept = [0]
    with stashing(model, buffer_size_factor_cuda=-1.0):
        for microbatches, expected in zip(numbers, plain, strict=True):
            assert train(model, 7, microbatches) == expected
            kept.append(statistics().kept)
    assert kept[0] < kept[1] == kept[2] < kept[3] == kept[4] == kept[5]


class ExpertFailed(RuntimeError):
    """Raised in an expert of a test."""


@pytest.mark.parametrize("where", ["amid", "behind"])
def test_an_exception_in_an_expert_leaves_nothing_behind(applied, where):
    """In the second microbatch, while the first one waits for its backward."""
    model = build(num_layers=2)
    plain = [train(model, number) for number in range(3)]
    experts = model.decoder.layers[1].mlp.experts
    failing, calls = experts.local_experts[2].linear_fc1 if where == "amid" else experts, []

    def fail(*_):
        calls.append(failing)
        if len(calls) == 2:
            raise ExpertFailed

    with stashing(model):
        assert [train(model, number) for number in range(2)] == plain[:2]
        hook = failing.register_forward_hook(fail)
        with pytest.raises(ExpertFailed):
            train(model, 2)
        hook.remove()
        cases.forget(model)
        before = statistics()
        assert not pages_taken(before)
        assert train(model, 2) == plain[2]
        assert statistics().stashed > before.stashed


def test_every_layer_has_its_own_flag(applied):
    """Experts of each layer hold a config of their own."""
    model = build(num_layers=2)
    plain, found = [train(model, number) for number in range(2)], []
    for modules in ([model], [model.decoder.layers[0].mlp.experts]):
        with stashing(*modules):
            assert [train(model, number) for number in range(2)] == plain
            found.append(statistics())
    of_both, of_one = found
    assert 2 * of_one.stashed == of_both.stashed > 0 and 2 * of_one.kept == of_both.kept


# Sizes


def test_what_does_not_fit_is_kept(applied):
    first, second, third = changing_nothing(build(), (0, 1, 2), buffer_size_factor_cuda=0.2)
    assert 0 < second.stashed < third.stashed
    assert first.kept < second.kept < third.kept


@pytest.mark.parametrize("model", [{}, DROPLESS], ids=["padded", "dropless"])
def test_a_host_pool_by_itself(applied, model):
    _, last = changing_nothing(build(**model), **HOST_ONLY)
    assert last.spilled > 0 and last.stashed == 0
    assert all(pool.nbytes < pool.host_nbytes for pool in last.pools)


def test_a_host_pool_takes_what_does_not_fit(applied):
    sizes = {"buffer_size_factor_cuda": 0.3, "buffer_size_factor_cpu": 2.0}
    first, last = changing_nothing(build(), **sizes)
    assert last.stashed > 0 and last.spilled > 0 and last.kept == first.kept


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_negative_factors_are_of_what_there_was(applied, where):
    """What one step wanted is exactly enough for the same step."""
    values = {"buffer_size_factor_cuda": 0.0, f"buffer_size_factor_{where}": -1.0}
    first, second, third = changing_nothing(build(), (0, 0, 0), **values)
    assert first.kept == second.kept == third.kept > 0
    assert (third.stashed if where == "cuda" else third.spilled) == 2 * first.kept
    assert all(pool.most_wanted == pool.pages + pool.host_pages for pool in third.pools)


def test_memory_falls_by_what_buffers_are_too_large(applied):
    """Between forward and backward: buffers have twice the rows that have a token on average, so that pages take
    1.1 / 2 of what they free; and lists of pages take some bytes."""
    model, microbatches = build(), 2

    def held():
        with testing.Footprint() as footprint:
            losses = [cases.forward(model, microbatch) for microbatch in range(microbatches)]
            between = footprint.held_bytes
        sum(losses).backward()
        return between

    held()  # rotary tables are made once
    plain = held()
    with stashing(model):
        held(), held()
        freed = plain - held()
        in_pools = sum(pool.nbytes for pool in statistics().pools)
        assert statistics().stashed == 2 * statistics().kept  # all of it is in pages
    # Of 4 experts with 36 rows each: the input, gate and up, and at least three more of the inner width.
    saved = microbatches * 4 * 36 * (cases.HIDDEN + 5 * cases.EXPERT) * 4
    assert 0.9 * saved < freed
    assert 0.5 < in_pools / saved < 0.65


# Where there is nothing to gain


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "shim" and r.levelno == logging.WARNING]


def test_dropless_experts_without_host_pool_are_left_alone(applied, caplog):
    """Their buffers hold nothing but tokens. One warning says so, and there is no pool."""
    _, last = changing_nothing(build(**DROPLESS))
    assert last.stashed == last.kept == 0 and last.pools == ()
    [warning] = warnings_in(caplog)
    assert "nothing was stashed" in warning and "no spare rows" in warning


def test_rows_of_a_rank_capacity_are_left_to_the_fused_operations(applied, caplog):
    """From 0.20 other experts have them too, behind all tokens. Nobody tells such a forward how many there are."""
    model = build(**DROPLESS)
    for config in cases.configs(model):
        config.moe_expert_rank_capacity_factor = 2.0
    _, last = changing_nothing(model)
    assert last.stashed == last.kept == 0 and last.pools == ()
    assert "moe_expert_rank_capacity_factor" in warnings_in(caplog)[0]


def test_a_capacity_factor_of_one_is_left_alone(applied, caplog):
    _, last = changing_nothing(build(moe_expert_capacity_factor=1.0))
    assert last.stashed == last.kept == 0 and last.pools == ()
    [warning] = warnings_in(caplog)
    assert "moe_expert_capacity_factor=1.0" in warning


def test_a_dense_model_is_left_alone(applied, caplog):
    _, last = changing_nothing(testing.build_gpt(mtp_num_layers=None))
    assert (last.stashed, last.kept, last.pools, last.skipped) == (0, 0, (), {})
    assert not warnings_in(caplog)


def test_without_the_flag_nothing_happens(applied, caplog):
    """Whatever the other flags say."""
    model = build()
    with stashing(model):
        for config in cases.configs(model):
            config.moe_paged_stash = False
        assert train(model) == train(model)
        found = statistics()
        assert (found.stashed, found.kept, found.pools, found.skipped) == (0, 0, (), {})
    assert not warnings_in(caplog)


@pytest.mark.skipif(cases.VERSION < (0, 16), reason="fine-grained offloading came with 0.16")
def test_together_with_fine_grained_offloading_of_other_modules(applied, monkeypatch):
    """Upstream's real manager, with stand-ins for CUDA's events and for Transformer Engine's flag."""
    offload = import_module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    extensions = import_module("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(extensions, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
    monkeypatch.setattr(torch.cuda, "Event", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "nvtx", mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    offloaded = mock.Mock(wraps=offload.ChunkOffloadHandler.bulk_offload_group)
    bulk = lambda *args: offloaded(*args)  # noqa: E731  a function, so that it is a method
    monkeypatch.setattr(offload.ChunkOffloadHandler, "bulk_offload_group", bulk)
    norms = {"offload_modules": ["attn_norm", "mlp_norm"], "min_offloaded_tensor_size": 0}
    model = build(num_layers=3, transformer_impl="transformer_engine", fine_grained_activation_offloading=True, **norms)
    plain = build(num_layers=3)
    expected = [train(plain, number, microbatches=1) for number in range(3)]
    with stashing(model):
        for number in range(3):
            offload.FineGrainedActivationOffloadingInterface.reset()
            assert train(model, number, microbatches=1) == expected[number]
        assert offloaded.called and statistics().stashed > 0


# Grouped experts


class Grouped(torch.nn.Module):
    """A stand-in, because constructors of grouped experts need a GPU or Transformer Engine. One expert for all rows."""

    def __init__(self):
        super().__init__()
        self.config = build().config
        self.w1, self.w2 = (torch.nn.Parameter(torch.randn(shape)) for shape in ((32, 20), (20, 32)))

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        hidden = (permuted_local_hidden_states @ self.w1).sigmoid() * permuted_probs.unsqueeze(-1)
        return hidden @ self.w2, None


ROWS = 72
HAS_TOKEN = torch.arange(ROWS) % 3 == 0


def grouped_gradients(experts, forward, by_name):
    """Of the input, of the weights, and of probabilities of rows that have a token."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, 32, generator=generator).requires_grad_()
    probs = (torch.rand(ROWS, generator=generator) * HAS_TOKEN).requires_grad_()
    rest = {"tokens_per_expert": torch.tensor([ROWS]), "permuted_probs": probs}
    experts.zero_grad()
    output, _ = forward(experts, hidden, **rest) if by_name else forward(experts, hidden, *rest.values())
    output.square().sum().backward()
    return [hidden.grad, *(weight.grad.clone() for weight in experts.parameters()), probs.grad[HAS_TOKEN]]


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_what_grouped_experts_are_wrapped_with_stashes(applied, by_name):
    """On a stand-in with the signature of the real ones. The fused operations are left to _fused_forward."""
    patch = import_module(cases.PATCH)
    options = {**OPTIONS, "moe_paged_stash_buffer_size_factor_cpu": 0.0, "overflow": "keep"}
    experts, forward = Grouped(), patch.bindings("v0_17", options)[patch.TE_GROUPED](Grouped.forward)
    plain = grouped_gradients(experts, Grouped.forward, by_name)
    with stashing(experts):
        for _ in range(3):
            assert all(map(torch.equal, grouped_gradients(experts, forward, by_name), plain))
        found = statistics()
        assert found.stashed == 2 * found.kept > 0
        experts._with_fused_impl = True
        assert all(map(torch.equal, grouped_gradients(experts, forward, by_name), plain))
        assert statistics() == found


def test_grouped_experts_are_wrapped(applied):
    """On the classes themselves, of which GroupedMLP is there up to 0.16."""
    classes = {name: found for name, found in vars(upstream_experts).items() if name in ("GroupedMLP", "TEGroupedMLP")}
    assert set(classes) == {"TEGroupedMLP"} | ({"GroupedMLP"} if cases.VERSION < (0, 17) else set())
    for name, found in classes.items():
        assert applied[ID].targets[f"{found.__module__}:{name}.forward"] == "bound"
        assert vars(found)["forward"].__module__ == found.__module__  # as its original's, so that pickles find it
        assert vars(found)["forward"].__code__.co_filename.endswith(os.path.join("paged_stash", "plain_experts.py"))


# torch.compile


def test_compiled_experts_are_left_alone(applied, monkeypatch):
    """The graph has nothing but the original forward, and what is not compiled is stashed as ever."""
    # Of a process group that is not given, which would break the graph.
    monkeypatch.setattr("megatron.core.utils.warnings", SimpleNamespace(warn=lambda *args, **kwargs: None))
    [expert, *_], rows = experts_of(build()), torch.randn(36, 32)
    probs = torch.rand(36) * (torch.arange(36) % 2)

    def gradients(forward):
        expert.zero_grad()
        forward(rows, probs)[0].square().sum().backward()
        return [weight.grad.clone() for weight in expert.parameters()]

    plain = gradients(expert)
    torch._dynamo.reset()
    with stashing(expert):
        compiled = torch.compile(expert, backend="eager", fullgraph=True)
        for _ in range(2):
            assert all(map(torch.equal, gradients(compiled), plain))
        assert statistics().stashed == statistics().kept == 0
        for _ in range(2):
            assert all(map(torch.equal, gradients(expert), plain))
        assert statistics().stashed > 0
    torch._dynamo.reset()
