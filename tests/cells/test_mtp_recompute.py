"""Patch mtp-recompute on a real release: MTP layers are recomputed, and no bit of losses or gradients changes."""

import contextlib
import itertools
import types

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from megatron.core import tensor_parallel
from mtp_recompute_cases import (
    ID,
    PACKED,
    ROWS,
    VERSION,
    ByKeyword,
    ByPosition,
    applied_on_one_rank,
    build,
    calls_of,
    expected_calls,
    inner_of,
    of_each_method,
    random_states,
    row_of,
    seed,
    subclassed,
    train,
    trained_parts,
)
from recompute_cases import METHODS, all_pairs, equal_bits
from thorough import in_full, times

import shim
from shim import testing
from shim.testing import Layout

CELLS = {
    "0.17.1": "all",
    "0.19.2": [
        "test_stock_does_not_take_the_function_of_an_older_subclass",
        "test_somebody_s_wrapper_around_what_is_recomputed_may_take_any_arguments",
    ],
}

has_hybrid_mtp = pytest.mark.skipif(VERSION < (0, 17), reason="the hybrid model has MTP from 0.17")
repeats_layers = pytest.mark.skipif(VERSION < (0, 17), reason="mtp_use_repeated_layer came with 0.17")
CASES = all_pairs(method=METHODS, row=ROWS, layers=(1, 2), dropout=(0.0, 0.1), lora=(False, True))


@pytest.fixture(scope="module")
def applied():
    """Tests that need none of it, and those that fork ranks, come before those that do."""
    with applied_on_one_rank() as report:
        yield report


def same_in_all(cases, **model):
    """Cases in which a run with recompute and one without are not the same to the bit, or nothing was compared."""
    wrong = []
    for case in cases:
        options = {name: value for name, value in case.items() if name not in ("method", "row")} | model
        row = row_of(case["row"])
        plain = train(build(**options), row)
        again = train(build(case["method"], **options), row)
        if not (plain.grads and plain.mtp and equal_bits(plain, again)):
            wrong.append((case, testing.differences(again, plain)))
    return wrong


# Stock is wrong


def stock_failure(method, packed):
    """What stock raises with two MTP layers, or None."""
    if VERSION < (0, 14):
        return None
    if VERSION == (0, 18):
        return TypeError, "unexpected keyword argument 'padding_mask'"
    if method.startswith("block"):
        return (NameError, "'warnings' is not defined") if VERSION < (0, 16) else None
    if method == "uniform 2":
        return AssertionError, "must be 1 for MTP recompute"
    return (TypeError, "PackedSeqParams") if packed and VERSION < (0, 19) else None


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@of_each_method
def test_stock_raises_or_does_not_recompute(one_rank, method, packed):
    """What the patch is for, case by case; only uniform 1 is right, on unpacked rows and on 0.19."""
    if packed and VERSION < (0, 16):
        pytest.skip("stock refuses packed rows before 0.16")
    model, row, failure = build(method), row_of("plain" if packed else "unpacked"), stock_failure(method, packed)
    calls = calls_of(model)
    if failure:
        with pytest.raises(failure[0], match=failure[1]):
            train(model, row)
        return
    train(model, row)
    right = method == "uniform 1" and VERSION >= (0, 14)
    assert calls == (expected_calls(method) if right else [[True], [True]])


@pytest.mark.skipif(VERSION < (0, 14) or VERSION >= (0, 18), reason="before 0.14 nothing is recomputed, 0.18 raises")
def test_stock_does_not_train_adapters_behind_frozen_weights(one_rank):
    """No input of the checkpoint requires a gradient, so its output has none: the adapters stay as they are."""
    with contextlib.ExitStack() as failing:
        plain, again = (trained_parts("mtp", method) for method in (None, "uniform 1"))
        assert train(plain, row_of("unpacked")).grads
        failing.enter_context(pytest.raises((AssertionError, RuntimeError)))
        assert train(again, row_of("unpacked")).grads


@pytest.mark.skipif(VERSION < (0, 18), reason="up to 0.17 a subclass may pass a function")
def test_stock_does_not_take_the_function_of_an_older_subclass(one_rank):
    for layer_class in (ByKeyword, ByPosition):
        with pytest.raises(TypeError):
            train(subclassed(layer_class, "uniform 1"), row_of("unpacked"))


def test_dropout_makes_a_difference(one_rank):
    """Otherwise the tests of it would say nothing: another result without it, and with another seed."""
    model, row = build(dropout=0.1), row_of("unpacked")
    results = [train(model, row), train(build(), row)]
    seed(6)
    results.append(testing.run_packed(model, row))
    assert not any(equal_bits(a, b) for a, b in itertools.combinations(results, 2))
    assert equal_bits(results[0], train(model, row))
    # The inner layer draws from both random states.
    for hook_of in ("torch", "model-parallel-rng"):
        seed()
        before = random_states()[hook_of]
        testing.run_packed(model, row)
        assert not torch.equal(before, random_states()[hook_of])


# Nothing else changes


def test_the_class_is_given_back(one_rank):
    before = dict(vars(mtp.MultiTokenPredictionLayer))
    with shim.patched(only=[ID], require=[ID]) as report:
        during = dict(vars(mtp.MultiTokenPredictionLayer))
        names = {target.rpartition(".")[2] for target in report[ID].targets}
        assert {name for name in before if during[name] is not before[name]} == names
        assert all(isinstance(during[name], types.FunctionType) for name in names)
    after = dict(vars(mtp.MultiTokenPredictionLayer))
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)


def test_checkpoints_have_the_keys_they_always_had(one_rank):
    def keys(model):
        return model.state_dict().keys(), model.sharded_state_dict().keys()

    stock = keys(build("uniform 1"))
    with shim.patched(only=[ID]):
        assert keys(build("uniform 1")) == stock


# By itself, on two ranks, together with all patches


def test_by_itself_the_patch_recomputes_what_the_release_can_train(one_rank):
    """Without mtp-packed-sequences: unpacked rows, and plain packed ones from 0.16."""
    rows = ["unpacked"] + ["plain"] * (VERSION >= (0, 16))
    with shim.patched(only=[ID], require=[ID]):
        assert not same_in_all(all_pairs(method=METHODS, row=rows, dropout=(0.0, 0.1), lora=(False, True)))
        for method in METHODS:
            model = build(method)
            calls = calls_of(model)
            train(model, row_of(rows[-1]))
            assert calls == expected_calls(method)


def test_together_with_all_patches(one_rank):
    with shim.patched(require=[ID]):
        assert not same_in_all(all_pairs(method=METHODS, row=ROWS, dropout=(0.0, 0.1)))


@pytest.mark.skipif(VERSION < (0, 18), reason="until then the recomputed function is an argument")
def test_somebody_s_wrapper_around_what_is_recomputed_may_take_any_arguments(one_rank, monkeypatch):
    """It is there before apply(). What it hides, the names of the arguments, is no reason to refuse the patch."""
    upstream, calls = mtp.MultiTokenPredictionLayer._proj_and_transformer_layer, []

    def counted(self, *args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return upstream(self, *args, **kwargs)

    monkeypatch.setattr(mtp.MultiTokenPredictionLayer, "_proj_and_transformer_layer", counted)
    with shim.patched(require=[ID]):
        assert not same_in_all([{"method": "uniform 1", "row": "padded"}])
    assert len(calls) > 4


def on_rank(layout, cases):
    with testing.megatron_on_cpu(), shim.patched(only=[PACKED, ID], require=[ID]), testing.layout_initialised(layout):
        return same_in_all(cases, sequence_parallel=layout.sequence_parallel)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sequence_parallel=True), pytest.param(Layout(tp=2), marks=in_full)], ids=str
)
def test_recompute_changes_no_bit_under_tensor_parallelism(ranks2, layout):
    assert ranks2.run(on_rank, layout, CASES[:: times(4, 1)]) == [[], []]


# Trainers that replace the checkpoint's backward


@contextlib.contextmanager
def layers_found(monkeypatch):
    """A backward of CheckpointFunction as a trainer has it, that frees the inputs of what it has recomputed, but not
    those of MTP layers, which it knows by a layer among the cells of the function. This one only counts, because what
    is freed by mistake ends the process. Yields how many checkpoints were an MTP layer's, and how many were not."""
    upstream, counts = tensor_parallel.random.CheckpointFunction.backward, {"mtp": 0, "other": 0}

    def backward(ctx, *grads):
        cells = [cell.cell_contents for cell in ctx.run_function.__closure__ or ()]
        found = any(isinstance(value, mtp.MultiTokenPredictionLayer) for value in cells)
        counts["mtp" if found else "other"] += 1
        return upstream(ctx, *grads)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_parallel.random.CheckpointFunction, "backward", staticmethod(backward))
        yield counts


def test_a_backward_that_looks_for_the_layer_finds_it(monkeypatch):
    """With all patches on, also through what carries an override."""
    with testing.megatron_on_cpu(), shim.patched(), testing.layout_initialised(Layout()):
        for kind in ("unpacked", "padded"):
            plain = train(build(), row_of(kind))
            for fields in ({}, {"rotary_interleaved": False}):
                model = build("uniform 1")
                with layers_found(monkeypatch) as counts, shim.config_override(model.config, **fields):
                    again = train(model, row_of(kind))
                assert counts == {"mtp": 2, "other": 2}
                assert equal_bits(plain, again)


# No bit changes


@pytest.mark.parametrize("case", CASES[:: times(2, 1)], ids=lambda case: "-".join(map(str, case.values())))
def test_recompute_changes_no_bit(applied, case):
    """Losses, logged losses and all gradients, with dropout, too: what is run again draws the same numbers."""
    assert not same_in_all([case])


@of_each_method
def test_random_states_go_on_as_without_recompute(applied, method):
    """The step after the next draws the same numbers, because backward leaves the random states alone."""
    states = []
    for chosen in (None, method):
        train(build(chosen, dropout=0.1), row_of("padded"))
        states.append(random_states())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("options", [{"per_token_loss": True}, {"loss_mask": False}], ids=str)
def test_recompute_changes_no_bit_of_other_losses(applied, options):
    row = row_of("padded")
    assert equal_bits(train(build(), row, **options), train(build("uniform 1"), row, **options))


@has_hybrid_mtp
@pytest.mark.parametrize("method", ["uniform 1", "uniform 2", "block 1"])
@pytest.mark.parametrize("pattern", times(["**/*"], ["**/*", "*-*-/*-/*-"]))
def test_recompute_changes_no_bit_of_the_hybrid_model(applied, pattern, method):
    for kind in ROWS:
        results = [
            train(testing.build_hybrid(pattern, hidden_dropout=0.1, **options), row_of(kind))
            for options in ({}, METHODS[method])
        ]
        assert results[0].grads and equal_bits(*results)


@repeats_layers
@pytest.mark.parametrize("depths", [1, 2])
@of_each_method
def test_recompute_changes_no_bit_with_one_layer_for_all_depths(applied, depths, method):
    """The layer is number 0 at every depth: block recomputes it each time."""
    again = build(method, depths, dropout=0.1, mtp_use_repeated_layer=True)
    calls = calls_of(again)
    plain = build(None, depths, dropout=0.1, mtp_use_repeated_layer=True)
    assert equal_bits(train(plain, row_of("padded")), train(again, row_of("padded")))
    assert calls == [[False] * depths + [True] * depths]


# Failures


class Broken(Exception):
    pass


def failing_at(model, call):
    """The transformer layer of the first MTP layer raises when it runs for the `call`-th time, from 1, and is then
    whole again."""
    left = [call]

    def fail(*_):
        left[0] -= 1
        if left[0] == 0:
            handle.remove()
            raise Broken(call)

    handle = inner_of(model.mtp.layers[0]).register_forward_pre_hook(fail)


@pytest.mark.parametrize("call", [1, 2], ids=["forward", "recompute"])
@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_an_exception_comes_through_and_leaves_nothing_behind(applied, method, call):
    """The next step draws the numbers, and gives the bits, that it has without recompute: not seeded again, so that
    a random state left forked would show."""
    row, results = row_of("padded"), []
    for chosen in (None, method):
        model = build(chosen, dropout=0.1)
        if chosen or call == 1:  # without recompute there is no second run
            failing_at(model, call)
            with pytest.raises(Broken) as error:
                train(model, row)
            assert error.value.args == (call,)
        else:
            train(model, row)
        results.append(testing.run_packed(model, row))
    assert equal_bits(*results)


# torch.compile


COMPILED = [("projection", "aot_eager"), ("projection", "eager"), ("mlp", "eager")]


@pytest.mark.parametrize(("part", "backend"), times(COMPILED[:1], COMPILED))
def test_compiled_parts_are_recomputed(applied, part, backend):
    """The projection, or a part of the transformer layer (the whole takes ten seconds to compile), in place: to the
    bit what they give without recompute."""
    row, results, calls = row_of("padded"), [], []
    torch._dynamo.reset()
    for method in (None, "uniform 1"):
        model = build(method, layers=1)
        layer = model.mtp.layers[0]
        layer.hnorm.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        (layer.eh_proj if part == "projection" else inner_of(layer).mlp).compile(backend=backend)
        results.append(train(model, row))
    assert calls == [True, False, True]
    assert equal_bits(*results)
    assert testing.worst(testing.differences(results[1], train(build("uniform 1", layers=1), row))) <= 1e-6
