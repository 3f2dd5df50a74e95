"""fused-linear-logprob with a LoRA adapter around the output layer: layouts, frozen and trained weights, dropout."""

import contextlib

import pytest
import torch
from adapter_like_bridge import under_the_names_of_bridge, with_adapter
from linear_loss_cases import (
    DEV,
    ID,
    PP,
    SP,
    TP,
    build,
    gradients,
    logits_counted,
    microbatches,
    off_by,
    on_one_rank,
    patched,
    rows_of,
    step,
)

import shim
from shim import testing

CELLS = {"0.16.1": "all"}

pytestmark = pytest.mark.skipif(
    DEV, reason="stock's model there names an argument that Megatron-Bridge's wrapper lacks"
)


@pytest.fixture(autouse=True)
def names():
    with under_the_names_of_bridge():
        yield


@on_one_rank
@pytest.mark.parametrize(
    ("depths", "tied", "frozen"), [(None, False, True), (1, False, True), (2, True, True), (1, False, False)]
)
def test_losses_and_gradients_are_those_of_fp64_and_no_logits_are_made(depths, tied, frozen):
    exact = step(with_adapter(build(depths, tied), frozen=frozen).double())
    with logits_counted() as calls:
        stock = step(with_adapter(build(depths, tied), frozen=frozen))
        assert len(calls) == 2 * (1 + (depths or 0))
        calls.clear()
        with patched():
            model = with_adapter(build(depths, tied), frozen=frozen)
            found = step(model)
            assert shim.check(model)[ID].state == "applied"
        assert not calls
    assert off_by(found, stock) < 2e-6
    assert off_by(found, (exact[0].float(), {name: grad.float() for name, grad in exact[1].items()})) < 2e-6
    names = [name for name in found[1] if "output_layer" in name]
    adapted = ["output_layer.adapter.linear_in.weight", "output_layer.adapter.linear_out.weight"]
    assert names == adapted if frozen else len(names) == 3


@on_one_rank
def test_bf16_is_as_exact_as_stock():
    half = {"bf16": True, "params_dtype": torch.bfloat16}
    exact = step(with_adapter(build(1, **half).bfloat16()).double())
    stock = step(with_adapter(build(1, **half).bfloat16()))
    with patched(), logits_counted() as calls:
        found = step(with_adapter(build(1, **half).bfloat16()))
    assert not calls and off_by(found, stock) < 3e-2
    for layer in ("linear_in", "linear_out"):
        name = f"output_layer.adapter.{layer}.weight"
        error, of_stock = ((grads[name].double() - exact[1][name]).norm() for _, grads in (found, stock))
        assert error < 1.5 * of_stock


@on_one_rank
def test_dropout_before_the_adapter_is_its_own():
    """The same mask, because the adapter's own forward draws it."""

    def dropped(seed):
        model = with_adapter(build(1), dropout=0.5)
        torch.manual_seed(seed)
        return step(model)

    stock = dropped(11)
    with patched(), logits_counted() as calls:
        found = dropped(11)
        other = dropped(12)
    assert not calls and off_by(found, stock) < 2e-6 < off_by(other, stock)


@on_one_rank
def test_a_disabled_adapter_adds_nothing():
    model = with_adapter(build(1), frozen=False)
    model.output_layer.enabled = False
    with patched(), logits_counted() as calls:
        losses, grads = step(model)
    right = step(build(1))
    renamed = {name.replace("to_wrap.", ""): grad for name, grad in grads.items()}
    assert not calls and off_by((losses, renamed), right) < 2e-6


@on_one_rank
@pytest.mark.parametrize(("depths", "frozen"), [(2, True), (1, False)])
def test_gradient_accumulation_fusion(depths, frozen):
    stock = microbatches(with_adapter(build(depths), frozen=frozen), False)
    with patched(), logits_counted() as calls:
        found = microbatches(with_adapter(build(depths), frozen=frozen), True)
    assert not calls and off_by((torch.zeros(1), found), (torch.zeros(1), stock)) < 2e-6


def compared(layout, depths, tied, frozen):
    options = {"sequence_parallel": layout.sequence_parallel, "num_layers": layout.pp}
    found = []
    with under_the_names_of_bridge(), testing.megatron_on_cpu(), testing.layout_initialised(layout):
        with logits_counted() as calls:
            for context in (contextlib.nullcontext(), patched()):
                calls.clear()
                with context:
                    model = with_adapter(build(depths, tied, **options), frozen=frozen)
                    found.append(on_this_rank(model, layout))
    return off_by(found[1], found[0]), len(calls)


def on_this_rank(model, layout):
    if layout.pp == 1:
        return step(model)
    if model.pre_process:
        return torch.zeros(1), {}
    states = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model.set_input_tensor(states)
    losses, grads = step(model)
    return losses, {**grads, "states": states.grad}


@pytest.mark.parametrize(
    ("layout", "depths", "tied", "frozen"),
    [(TP, 1, True, True), (SP, 1, False, True), (SP, None, True, True), (TP, None, False, False), (PP, 1, True, True)],
    ids=str,
)
def test_layouts(ranks2, layout, depths, tied, frozen):
    for off, calls in ranks2.run(compared, layout, depths, tied, frozen):
        assert off < 3e-6 and not calls


@on_one_rank
def test_bytes_of_a_step():
    """No weight of both: it would be a copy of the large one."""
    options = {"vocab_size": 1 << 14, "hidden_size": 64}

    def peak():
        model = with_adapter(build(1, **options), rank=8)
        model.requires_grad_(False)
        model.output_layer.adapter.requires_grad_(True)
        rows = torch.arange(4 * 128).view(4, 128)
        with testing.Footprint() as footprint:
            model(rows, rows % 128, None, labels=rows + 1).mean().backward()
        return footprint.peak_bytes / (rows.numel() * (1 << 14) * 4)

    stock = peak()
    with patched():
        found = peak()
    assert stock > 2 and found < 0.5


def with_dropout_on_logits(model):
    return with_adapter(model, dropout=0.5, dropout_position="post")


def with_another_wrapper(model):
    with_adapter(model)
    model.output_layer.__class__ = type("Merged", (type(model.output_layer),), {})
    return model


def with_another_adapter(model):
    with_adapter(model)
    model.output_layer.adapter.__class__ = type("Gated", (type(model.output_layer.adapter),), {})
    return model


def with_a_hook(model):
    with_adapter(model)
    model.output_layer.adapter.register_forward_hook(lambda *_: None)
    return model


def with_gathered_logits(model):
    with_adapter(model)
    model.output_layer.adapter.linear_out.gather_output = True
    return model


@on_one_rank
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_dropout_on_logits, "has its dropout on logits"),
        (with_another_wrapper, "is a Merged"),
        (with_another_adapter, "adapter of the output layer is a Gated"),
        (with_a_hook, "hooks on the adapter"),
        (with_gathered_logits, "gathers its logits"),
    ],
)
def test_what_takes_stocks_way_and_that_check_says_so(change, said):
    model, other = change(build(1)), change(build(1))
    torch.manual_seed(0)
    stock = step(model)
    with shim.patched(only=[ID], options={ID: {"fuse": True}}), logits_counted() as calls:
        torch.manual_seed(0)
        found = step(other)
        report = shim.check(other)[ID]
        assert report.state == "inactive" and said in report.reason
    assert off_by(found, stock) == 0 and len(calls) == 4


@on_one_rank
def test_an_adapter_that_is_not_in_the_dtype_of_the_layer_gets_logits():
    """The sum is then a matter of the wrapper, as on stock."""
    model, other = with_adapter(build(1)), with_adapter(build(1))
    for each in (model, other):
        each.output_layer.adapter.linear_out.double()
    rows, labels = rows_of()
    said = None
    for each, context in ((model, contextlib.nullcontext()), (other, patched())):
        with context:
            try:
                each(rows, rows, None, labels=labels)
            except RuntimeError as error:
                assert said is None or str(error) == said
                said = str(error)
    assert said is not None and not gradients(other)
