"""mtp-loss-options: gradients of both models on packed rows, under recompute, with adapters, and on two ranks."""

import contextlib

import pytest
import torch
from torch import nn

import shim
from shim import testing
from shim.patches.megatron_core.mtp_loss_options.proof import SIZES, different, gradients, gradients_of

CELLS = {"0.17.1": "all"}

ID, OTHERS = "mtp-loss-options", ["mtp-packed-sequences", "mtp-recompute"]
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP, PP = testing.Layout(tp=2), testing.Layout(pp=2)
on_one_rank = pytest.mark.usefixtures("one_rank")


def patched(*ids, **options):
    return shim.patched(only=[ID, *ids], require=[ID], options={ID: options})


def build(depths, tied, **options):
    return testing.build_gpt(mtp_num_layers=depths, share_embeddings_and_output_weights=tied, **SIZES | options)


def of_a_packed_row(depths, tied, **options):
    """The gradients of a step on sequences with padding between them."""
    row = testing.pack(testing.random_sequences((5, 7, 4)), align=4)
    return testing.run_packed(build(depths, tied, **options), row).grads


def wrong(tied, options):
    """How many gradients are others: of the main model than without MTP, with each option, and of MTP than on stock."""
    with shim.patched(only=OTHERS):
        without = of_a_packed_row(None, tied, **options)
        stock = of_a_packed_row(2, tied, **options)
    with patched(*OTHERS, detach=True):
        found = of_a_packed_row(2, tied, **options)
    with patched(*OTHERS, skip_loss=True):
        skipped = of_a_packed_row(2, tied, **options)
    if tied and "embedding.word_embeddings.weight" in found:  # a last stage with MTP has the weight under this name
        without = {name.replace("output_layer", "embedding.word_embeddings"): grad for name, grad in without.items()}
    of_mtp = {name: grad for name, grad in stock.items() if name.startswith("mtp.")}
    return different(found, without) + different(skipped, without) + different(found, of_mtp), len(without), len(of_mtp)


@on_one_rank
def test_packed_rows_under_full_recompute():
    found, of_main, of_mtp = wrong(False, FULL)
    assert found == 0 and of_main and of_mtp


def on_ranks(layout, tied, options):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return wrong(tied, options)


@pytest.mark.parametrize(
    ("layout", "options", "tied"),
    [(TP, {**FULL, "sequence_parallel": True}, True), (PP, {"num_layers": 2}, True), (PP, {"num_layers": 2}, False)],
    ids=["tp", "pp-tied", "pp-untied"],
)
def test_on_two_ranks(ranks2, layout, options, tied):
    """Tensor and sequence parallelism, and a last stage whose embedding is a copy."""
    for found, of_main, of_mtp in ranks2.run(on_ranks, layout, tied, options):
        assert found == 0 and of_main and (of_mtp or layout is PP)


def with_adapters(depths):
    model = build(depths, False)
    testing.add_lora(model)
    return gradients_of(model)


@on_one_rank
def test_adapters():
    without, stock = with_adapters(None), with_adapters(2)
    with patched(detach=True):
        found = with_adapters(2)
    of_mtp = {name: grad for name, grad in stock.items() if name.startswith("mtp.")}
    assert without and of_mtp
    assert different(stock, without) and not different(found, {**without, **of_mtp})


@on_one_rank
def test_the_output_layer_itself_is_called():
    """Hooks on it wait for its weight under overlap_param_gather."""
    model, row, seen = build(2, False), torch.arange(8)[None], []
    model.output_layer.register_forward_pre_hook(lambda layer, args: seen.append(layer))
    with patched(detach=True):
        model(row, row, None, labels=row)
    assert len(seen) == 3 and all(layer is model.output_layer for layer in seen)


@on_one_rank
def test_without_labels_the_output_weight_keeps_its_gradient():
    """As with a loss of reinforcement learning. mtp-packed-sequences lets 0.12 to 0.16 do without labels."""
    found, row = [], torch.arange(8)[None]
    for depths in (None, 2):
        model = build(depths, False)
        with patched(*OTHERS, detach=True):
            model(row, row, None).square().mean().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert not different(found[1], found[0])


@on_one_rank
def test_losses_are_those_of_stock():
    """`detach` changes no value, and without gradients no call."""
    row = torch.arange(8)[None]
    model = build(2, True)
    stock = model(row, row, None, labels=row)
    with patched(detach=True):
        assert torch.equal(model(row, row, None, labels=row), stock)
        with torch.no_grad():
            assert torch.equal(model(row, row, None, labels=row), stock)


@on_one_rank
@pytest.mark.parametrize("detach", [False, True])
def test_a_loss_that_is_left_out_takes_no_logits_and_layers_run(detach):
    """A trainer's own loss on what the layers give trains them, and with `detach` only them."""
    calls, given = [], []
    model, row = build(2, True), torch.arange(8)[None]
    model.output_layer.register_forward_hook(lambda *_: calls.append(1))
    for layer in model.mtp.layers:
        layer.register_forward_hook(
            lambda layer, args, out: given.append(out if isinstance(out, torch.Tensor) else out[0])
        )
    with patched(detach=detach, skip_loss=True):
        main = model(row, row, None, labels=row.roll(-1)).mean()
        assert len(calls) == 1 and len(given) == 2
        (main + sum(states.square().mean() for states in given)).backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(found[name].any() for name in found if name.startswith("mtp."))
    assert bool(different(found, gradients(mtp_num_layers=None))) is not detach


@on_one_rank
@pytest.mark.skipif(VERSION < (0, 14), reason="0.12 and 0.13 have no log without a loss")
def test_a_loss_that_is_left_out_is_not_logged():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(skip_loss=True))
        tracker = dict(MTPLossLoggingHelper.tracker)
        MTPLossLoggingHelper.tracker.clear()
        stack.callback(MTPLossLoggingHelper.tracker.update, tracker)
        gradients(mtp_num_layers=1)
        assert not MTPLossLoggingHelper.tracker


@on_one_rank
def test_nothing_happens_by_default_and_check_says_so():
    stock = gradients(mtp_num_layers=2)
    with shim.patched(only=[ID]):
        found = gradients(mtp_num_layers=2)
        report = shim.check(testing.build_gpt(**SIZES))[ID]
        assert (report.state, report.reason) == ("inactive", "the options detach and skip_loss are off")
    assert found.keys() == stock.keys() and not different(found, stock)
    with patched(skip_loss=True):
        assert shim.check(testing.build_gpt(**SIZES))[ID].state == "applied"


def overlap_of_experts(model):
    model.config.overlap_moe_expert_parallel_comm = True


def adapter_of_the_output_layer(model):
    model.output_layer.adapter = nn.Linear(16, 64, bias=False)


@on_one_rank
@pytest.mark.parametrize(
    ("change", "said"),
    [(overlap_of_experts, "without its block"), (adapter_of_the_output_layer, "trains output_layer.adapter.weight")],
)
def test_check_says_what_is_left_out(change, said):
    model = testing.build_gpt(**SIZES)
    change(model)
    with shim.patched(only=[ID], options={ID: {"detach": True}}):
        report = shim.check(model)[ID]
        assert report.state == "inactive" and said in report.reason
