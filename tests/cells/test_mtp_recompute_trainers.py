"""Patch mtp-recompute on a real release: frozen weights, adapters and subclasses, as trainers have them."""

import pytest
import torch
from mtp_recompute_cases import (
    PARTS,
    ROWS,
    VERSION,
    ByKeyword,
    ByName,
    ByPosition,
    applied_on_one_rank,
    calls_of,
    expected_calls,
    layer_inputs,
    of_each_method,
    output_of,
    row_of,
    subclassed,
    train,
    trained_parts,
)
from recompute_cases import METHODS, all_pairs, equal_bits

CELLS = {"0.14.0": "all"}

has_checkpointed_forward = pytest.mark.skipif(VERSION < (0, 14), reason="no _checkpointed_forward before 0.14")


@pytest.fixture(scope="module")
def applied():
    with applied_on_one_rank() as report:
        yield report


FROZEN = [
    case
    for case in all_pairs(part=PARTS, method=METHODS, embedded=(False, True), row=("unpacked", "padded"))
    if case["embedded"] or case["part"] != "decoder"  # see build()
]


@pytest.mark.parametrize("case", FROZEN, ids=lambda case: "-".join(map(str, case.values())))
def test_frozen_weights_change_nothing(applied, case):
    """Also where no input of a layer requires a gradient, where nothing in a layer does, and where neither does."""
    part, method, embedded, row = case["part"], case["method"], case["embedded"], row_of(case["row"])
    plain = train(trained_parts(part, None, embedded, dropout=0.1), row)
    again = train(trained_parts(part, method, embedded, dropout=0.1), row)
    names = {name for name, weight in trained_parts(part, None).named_parameters() if weight.requires_grad}
    assert plain.grads.keys() == names and all(grad.any() for grad in plain.grads.values())
    assert equal_bits(plain, again)


@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_inputs_without_gradient_train_the_layer(applied, method):
    """The layer by itself: adapters inside get the very same gradients, and the caller's tensor stays a constant."""
    gradients = []
    for chosen in (None, method):
        model = trained_parts("mtp", chosen, layers=1)
        layer, inputs = model.mtp.layers[0], layer_inputs(model)
        output_of(layer, inputs).square().sum().backward()
        if VERSION < (0, 19):  # which makes this very tensor require one, with recompute and without
            assert not inputs["hidden_states"].requires_grad and inputs["hidden_states"].grad is None
        gradients.append([weight.grad for weight in layer.parameters() if weight.requires_grad])
    assert gradients[0] and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_a_layer_in_which_nothing_is_trained_gives_its_output(applied, method):
    outputs = []
    for chosen in (None, method):
        model = trained_parts("head", chosen, layers=1)
        outputs.append(output_of(model.mtp.layers[0], layer_inputs(model)))
    assert torch.equal(*outputs)


# Subclasses


@has_checkpointed_forward
@pytest.mark.parametrize("layer_class", [ByKeyword, ByPosition, ByName])
@of_each_method
def test_a_subclass_may_pass_its_own_function(applied, method, layer_class):
    """On every release, also where upstream's method no longer has a parameter for it."""
    for kind in ROWS if VERSION >= (0, 16) else ["unpacked"]:
        model = subclassed(layer_class, method, dropout=0.1)
        calls = calls_of(model)
        again = train(model, row_of(kind))
        assert equal_bits(train(subclassed(layer_class, None, dropout=0.1), row_of(kind)), again)
        assert calls == expected_calls(method)


@has_checkpointed_forward
@pytest.mark.parametrize("by_position", [False, True])
def test_a_subclass_of_a_later_release_passes_no_function(applied, by_position):
    """From 0.18 the tensors come first."""
    if VERSION < (0, 18):
        pytest.skip("up to 0.17 the function comes first")

    class Later(ByKeyword):
        @staticmethod
        def recompute(checkpointed, step, hidden_states, given, rest):
            rest = {**rest, **step.keywords}
            if by_position:
                return checkpointed(hidden_states, given, **rest)
            return checkpointed(hidden_states=hidden_states, decoder_input=given, **rest)

    plain, again = (train(subclassed(Later, method, dropout=0.1), row_of("padded")) for method in (None, "uniform 1"))
    assert equal_bits(plain, again)
