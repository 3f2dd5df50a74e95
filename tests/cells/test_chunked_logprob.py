"""Patch chunked-logprob on a real release: the exact losses and gradients, for less memory and fewer messages.

What becomes of logits that others read, a second backward and compiled callers: tests/ops/test_logprob_in_place.py and
test_logprob_memory.py.
"""

import inspect
import sys
import types
from unittest import mock

import megatron.core.fusions.fused_cross_entropy as fused
import pytest
import torch
from logprob_cases import Alias
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import Float16Module
from torch.utils._python_dispatch import TorchDispatchMode

import shim
from shim import testing
from shim.ops import _logprob_chunks
from shim.patches.megatron_core.chunked_logprob import proof as chunked_logprob_proof
from shim.patches.megatron_core.chunked_logprob.proof import BATCH, TOKENS, VOCABULARY, truth
from shim.testing import Footprint, Layout

CELLS = {"0.12.3": "all"}

ID = "chunked-logprob"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
DTYPES = ("float32", "bfloat16", "float16", "float64")
# The functions that a dtype and a kind of label smoothing concern: the fused one smooths nothing.
CASES = [("plain", dtype, smoothing) for dtype in DTYPES for smoothing in (0.0, 0.1)]
CASES += [("fused", dtype, 0.0) for dtype in DTYPES]
# The largest error of a gradient, of which entries are at most 1: absolute, and of one rounding to the dtype.
ABSOLUTE = 5e-7
SCRATCH = 1 << 14  # bytes; by default a pass may use more than all logits of this file
ROUNDING = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "float64": 0}


def losses_of(which, logits, target, smoothing=0.0):
    if which == "fused":
        return fused.fused_vocab_parallel_cross_entropy(
            logits, target, parallel_state.get_tensor_model_parallel_group()
        )
    return tensor_parallel.vocab_parallel_cross_entropy(logits, target, smoothing)


def sample(dtype):
    return chunked_logprob_proof.sample(getattr(torch, dtype))


def errors(which, dtype, smoothing, scratch=SCRATCH):
    """What is wrong with one forward and backward pass on this rank, by name; empty where all is right."""
    logits, target, weights = sample(dtype)
    losses, gradient = truth(logits, target, weights, smoothing)
    size, rank = (f() for f in (tensor_parallel_size, parallel_state.get_tensor_model_parallel_rank))
    gradient = gradient.chunk(size, -1)[rank]
    shard = logits.chunk(size, -1)[rank].contiguous()
    computed = shard.clone().requires_grad_() * 1
    # Stock's fused function is compiled, which takes a while.
    with torch.compiler.set_stance("force_eager"), mock.patch.object(_logprob_chunks, "_SCRATCH_CPU", scratch):
        with Footprint() as footprint:
            found = losses_of(which, computed, target, smoothing)
            forward = sum(footprint.collectives.values())
            kept = torch.equal(computed.detach(), shard)
            (mine,) = torch.autograd.grad((found * weights).sum(), computed)
    bound = ABSOLUTE + ROUNDING[dtype] * gradient.abs()
    has_target = (target >= 0).unsqueeze(-1)
    checks = {
        "loss": (found - losses)[target >= 0].abs().max().item() <= 1e-5,
        "loss dtype": found.dtype == torch.float32,
        "gradient": bool((((mine - gradient).abs() <= bound) | ~has_target).all()),
        "gradient dtype": mine.dtype == computed.dtype,
        "no target": found[target < 0].eq(0).all().item() and bool((mine.eq(0) | has_target).all()),
        "logits kept in forward": kept,
        "messages": (forward, sum(footprint.collectives.values())) == (size > 1, size > 1),
    }
    wrong = {name for name, right in checks.items() if not right}
    return wrong, footprint.peak_bytes


def tensor_parallel_size():
    return parallel_state.get_tensor_model_parallel_world_size()


def both(cases):
    """[(case, what is wrong on stock, and with the patch, peak on stock, and with the patch)] on this rank."""
    stock = [errors(*case) for case in cases]
    with shim.patched(only=[ID], require=[ID]):
        patched = [errors(*case) for case in cases]
    return [(case, *old, *new) for case, old, new in zip(cases, stock, patched, strict=True)]


def both_on_rank(cases):
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)):
        return both(cases)


@pytest.fixture(scope="module")
def found():
    """What `both` finds at TP 1, and at TP 2 on both ranks."""
    with testing.megatron_on_cpu(), testing.Ranks(2) as ranks:
        at_two = ranks.run(both_on_rank, CASES)
        with testing.layout_initialised(Layout()):
            return {1: both(CASES), 2: [result for rank in at_two for result in rank]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_gradients_are_exact(found, ranks):
    """In every dtype, smoothed or not; nothing for tokens without a target; one message forward and none backward."""
    assert {case: wrong for case, _, _, wrong, _ in found[ranks] if wrong} == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_never_more_memory_than_stock(found, ranks):
    """fp32 too, where stock overwrites the logits; but for the scratch of a pass and what there is for each token."""
    small = SCRATCH + 40 * 8 * TOKENS * BATCH
    assert small < 4 * TOKENS * BATCH * VOCABULARY / ranks / 2
    assert [result for result in found[ranks] if result[4] > result[2] + small] == []


@pytest.mark.usefixtures("one_rank")
def test_its_two_effects_are_apart():
    """Where every token has a target only the rounding of losses and gradients changes; values change of the others."""
    logits, target, weights = sample("float32")

    def step(target):
        computed = logits.clone().requires_grad_() * 1
        losses = losses_of("plain", computed, target)
        return losses.detach(), torch.autograd.grad((losses * weights).sum(), computed)[0]

    def off(found, expected):
        return ((found - expected).norm() / expected.norm()).item()

    whole = target.clamp(min=0)
    expected, stocks = step(whole), step(target)
    with shim.patched(only=[ID], require=[ID]):
        found, patched = step(whole), step(target)
    assert all(off(mine, true) < 5e-7 for mine, true in zip(found, expected, strict=True))
    assert stocks[0][target < 0].all() and not patched[0][target < 0].any()


def bits(which, dtype, smoothing):
    """Losses and gradient of this rank."""
    logits, target, weights = sample(dtype)
    rank = parallel_state.get_tensor_model_parallel_rank()
    computed = logits.chunk(tensor_parallel_size(), -1)[rank].contiguous().requires_grad_() * 1
    with torch.compiler.set_stance("force_eager"):
        losses = losses_of(which, computed, target, smoothing)
        return losses.detach(), torch.autograd.grad((losses * weights).sum(), computed)[0]


def other_bits(layout, case):
    """What differs from stock's bits if rounding is not asked for, and what tokens without a target have on stock."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        stock = bits(*case)
        with shim.patched(only=[ID]):
            found = bits(*case)
        has_target = sample(case[1])[1] >= 0
        differ = [not torch.equal(old[has_target], new[has_target]) for old, new in zip(stock, found, strict=True)]
        left = [bool(new[~has_target].any()) for new in found]
        return differ, left, [bool(old[~has_target].any()) for old in stock]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unasked_only_tokens_without_a_target_have_other_bits(ranks2, case):
    for layout in (Layout(), Layout(tp=2)):
        pool = ranks2 if layout.world == 2 else None
        for found in pool.run(other_bits, layout, case) if pool else [other_bits(layout, case)]:
            assert found == ([False, False], [False, False], [True, True])


def test_stock_has_these_errors(found):
    """Else the tests above could not fail."""
    for ranks, results in found.items():
        for (which, dtype, smoothing), wrong, *_ in results:
            assert "no target" in wrong
            assert ("logits kept in forward" in wrong) == (dtype == "float32")
            assert ("loss" in wrong) == (smoothing > 0 and ranks > 1)
            # A bf16 gradient is right for bf16 alone.
            assert "gradient" in wrong or which == "plain" or dtype == "bfloat16" or dtype == "float64"
            assert ("messages" in wrong) or ranks == 1


@pytest.fixture
def applied():
    with testing.layout_initialised(Layout()), shim.patched(only=[ID], require=[ID]) as report:
        yield report


# Few logits, for which calls cost more than arithmetic


def test_few_logits_are_as_exact(applied):
    wrong = {case: errors(*case, scratch=1 << 22)[0] for case in CASES}
    assert {case: found for case, found in wrong.items() if found} == {}


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(which, dtype, smoothing):
    logits, target, _ = sample(dtype)
    logits = logits.requires_grad_() * 1
    target = target.clamp(min=0)
    with torch.compiler.set_stance("force_eager"), Operations() as counted:
        torch.autograd.grad(losses_of(which, logits, target, smoothing).sum(), logits)
    return counted.count


def test_few_logits_take_no_more_operations_than_stock():
    with testing.layout_initialised(Layout()):
        stock = [operations(*case) for case in CASES]
        with shim.patched(only=[ID], require=[ID]):
            mine = [operations(*case) for case in CASES]
    assert [(case, *counts) for case, *counts in zip(CASES, mine, stock) if counts[0] > counts[1]] == []


def test_any_object_will_do_for_a_group_of_one(applied):
    """No default group is asked, and none is there in who computes losses by himself."""
    group = types.SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    logits, target = computed("bfloat16")
    with mock.patch.object(torch.distributed, "get_rank", side_effect=ValueError("no default group")):
        with mock.patch.object(torch.distributed, "get_world_size", side_effect=ValueError("no default group")):
            for scratch in (SCRATCH, 1 << 22):
                with mock.patch.object(_logprob_chunks, "_SCRATCH_CPU", scratch):
                    given = tensor_parallel.vocab_parallel_cross_entropy(logits, target, tp_group=group)
                torch.testing.assert_close(given, losses_of("plain", logits, target))


def computed(dtype="float32"):
    logits, target, _ = sample(dtype)
    return logits.requires_grad_() * 1, target


@pytest.mark.parametrize("scratch", [SCRATCH, 1 << 22], ids=["many", "few"])
@pytest.mark.parametrize("made", [lambda x: x, lambda x: x[:], Alias.apply], ids=["leaf", "view", "alias"])
def test_logits_that_are_a_leaf_are_left_as_they_are(applied, made, scratch, monkeypatch):
    monkeypatch.setattr(_logprob_chunks, "_SCRATCH_CPU", scratch)
    logits, target, weights = sample("float32")
    leaf = logits.clone().requires_grad_()
    (losses_of("plain", made(leaf), target) * weights).sum().backward()
    assert torch.equal(leaf.detach(), logits)
    assert (leaf.grad - truth(logits, target, weights, 0.0)[1]).abs().max() < ABSOLUTE


@pytest.mark.parametrize("scratch", [SCRATCH, 1 << 22], ids=["many", "few"])
def test_a_target_beyond_the_vocabulary_is_an_error(applied, scratch, monkeypatch):
    monkeypatch.setattr(_logprob_chunks, "_SCRATCH_CPU", scratch)
    logits, target = computed()
    target[3, 1] = VOCABULARY
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        losses_of("plain", logits, target)


def test_the_group_can_be_given(applied):
    """By the keyword that came with 0.19, on every release."""
    logits, target = computed("bfloat16")
    group = parallel_state.get_tensor_model_parallel_group()
    given = tensor_parallel.vocab_parallel_cross_entropy(logits, target, tp_group=group)
    assert torch.equal(given, losses_of("plain", logits, target))
    assert "tp_group" in inspect.signature(tensor_parallel.vocab_parallel_cross_entropy).parameters


def test_whoever_took_the_functions_by_name_is_served_too(monkeypatch):
    trainer = types.ModuleType("a_trainer")
    trainer.loss, trainer.fused = tensor_parallel.vocab_parallel_cross_entropy, fused.fused_vocab_parallel_cross_entropy
    before = trainer.loss, trainer.fused
    monkeypatch.setitem(sys.modules, "a_trainer", trainer)
    language = sys.modules["megatron.core.models.common.language_module.language_module"]
    with shim.patched(only=[ID], require=[ID]):
        assert trainer.loss is tensor_parallel.vocab_parallel_cross_entropy is not before[0]
        assert trainer.fused is language.fused_vocab_parallel_cross_entropy is not before[1]
    assert (trainer.loss, trainer.fused) == before
    assert language.fused_vocab_parallel_cross_entropy is before[1]


# Models


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {"plain": {}, "fused": {"cross_entropy_loss_fusion": True}, "recomputed": RECOMPUTE}


def step(model):
    row = testing.pack(testing.random_sequences((5, 7, 4)), align=4)
    with torch.compiler.set_stance("force_eager"):
        return testing.run_packed(model, row)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_it_does_without(name):
    options = {"mtp_num_layers": None, **MODELS[name]}
    with testing.layout_initialised(Layout()):
        stock = step(testing.build_gpt(**options))
        with shim.patched(only=[ID], require=[ID]):
            mine = step(testing.build_gpt(**options))
            assert shim.check().applied == (ID,)
    # Stock's fused function rounds the gradient to bf16.
    assert testing.worst(testing.differences(mine, stock)) < (1e-2 if name == "fused" else 1e-6)
    if name == "fused":
        assert testing.worst(testing.differences(mine, step_plain(options))) < 1e-6


def step_plain(options):
    with testing.layout_initialised(Layout()):
        return step(testing.build_gpt(**{**options, "cross_entropy_loss_fusion": False}))


def half(**options):
    """A bf16 model behind Float16Module, and its inputs."""
    model = testing.build_gpt(mtp_num_layers=None, bf16=True, params_dtype=torch.bfloat16, **options)
    row = testing.pack(testing.random_sequences((5, 7, 4)), align=4)
    inputs = {"input_ids": row.input_ids, "position_ids": row.position_ids, "attention_mask": None}
    return Float16Module(model.config, model), {**inputs, "packed_seq_params": row.packed_seq_params()}, row


@pytest.mark.parametrize(
    "given, keyword, expected",
    [
        ({}, {}, torch.float32),
        ({"fp32_output": False}, {}, torch.bfloat16),
        ({"fp32_output": False}, {"fp32_output": True}, torch.float32),
        ({}, {"fp32_output": False}, torch.bfloat16),
    ],
    ids=["as stock", "option", "option and keyword", "keyword"],
)
def test_logits_of_a_half_precision_model(given, keyword, expected):
    """In fp32 as stock has them, unless the option or the caller says otherwise; losses are fp32 always."""
    with testing.layout_initialised(Layout()):
        model, inputs, row = half()
        with shim.patched(only=[ID], require=[ID], options={ID: given}):
            assert model(**inputs, **keyword).dtype == expected
            assert model(**inputs, **keyword, labels=row.labels).dtype == torch.float32


def test_the_output_is_fp32_again_after_an_exception():
    with testing.layout_initialised(Layout()):
        model, inputs, _ = half()
        with shim.patched(only=[ID], require=[ID]):
            with pytest.raises(TypeError):
                model(**inputs, fp32_output=False, no_such_argument=1)
            assert model(**inputs).dtype == torch.float32
