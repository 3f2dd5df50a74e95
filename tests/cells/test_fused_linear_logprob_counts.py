"""fused-linear-logprob and the count of right predictions of multi-token prediction, which 0.19 logs in training."""

import contextlib

import pytest
import torch
from adapter_like_bridge import under_the_names_of_bridge, with_adapter
from linear_loss_cases import DEV, SP, TP, VERSION, build, logits_counted, on_one_rank, patched, rows_of

from shim import testing

CELLS = {"0.19.2": "all"}

pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason="the count came with 0.19")
HALF = {"bf16": True, "params_dtype": torch.bfloat16}


def logged_by(model, labels, mask=None):
    """What a step logs, by name."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    rows, _ = rows_of()
    model(rows, rows, None, labels=labels, loss_mask=mask).mean().backward()
    tracked = MTPLossLoggingHelper.tracker
    return {name: value.clone() for name, value in tracked.items() if torch.is_tensor(value)}


def predicted_by(model):
    """The labels, [b, s], with which every prediction of the first depth is right, and all of them on stock."""
    from megatron.core.transformer import multi_token_prediction

    found, counts = [], multi_token_prediction._compute_mtp_acceptance_counts

    def seen(logits, labels, mask, layer, gather, group):
        sharded = group is not None and group.size() > 1
        largest = multi_token_prediction._vocab_parallel_argmax(logits, group, group.size()) if sharded else None
        found.append(logits.argmax(-1) if largest is None else largest)
        return counts(logits, labels, mask, layer, gather, group)

    multi_token_prediction._compute_mtp_acceptance_counts = seen
    try:
        logged_by(model, rows_of()[1])
    finally:
        multi_token_prediction._compute_mtp_acceptance_counts = counts
    return found[0].t().roll(1, 1)


def compared(layout, mask, skip):
    """Per rank: what stock and the patch log, and how often the patch makes logits."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return of_both(lambda: build(2, sequence_parallel=layout.sequence_parallel), mask, skip_masked=skip)


def of_both(make, mask=None, **options):
    labels = predicted_by(make())
    labels[1] = rows_of()[1][1]
    logged = []
    with logits_counted() as calls:
        for context in (contextlib.nullcontext(), patched(**options)):
            calls.clear()
            with context:
                logged.append(logged_by(make(), labels, mask))
    return *logged, len(calls)


def assert_alike(stock, fused, calls, tolerance=1e-5):
    assert stock.keys() == fused.keys() and len(stock) > 1 and not calls
    for name, value in stock.items():
        counted = "correct" in name or "total" in name
        torch.testing.assert_close(fused[name], value, rtol=0 if counted else tolerance, atol=0)
    correct = [value for name, value in stock.items() if "correct" in name]
    assert correct and correct[0].any()


@on_one_rank
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_that_of_stock(tied):
    assert_alike(*of_both(lambda: build(2, tied)))


@pytest.mark.parametrize("layout", [TP, SP], ids=str)
@pytest.mark.parametrize("skip", [False, True])
def test_it_is_that_of_stock_on_two_ranks(ranks2, layout, skip):
    mask = torch.ones(2, 8)
    mask[0, 4:] = mask[1, 1] = 0
    for found in ranks2.run(compared, layout, mask, skip):
        assert_alike(*found)


@on_one_rank
def test_of_equal_logits_the_first_is_predicted():
    """Every token of the second half of the vocabulary has a twin in the first."""

    def make():
        model = build(2)
        with torch.no_grad():
            model.output_layer.weight[32:] = model.output_layer.weight[:32]
        return model

    assert_alike(*of_both(make))


@on_one_rank
@pytest.mark.parametrize("options", [HALF, {"use_mup": True, "mup_base_hidden_size": 4}], ids=["bf16", "muP"])
def test_with_bf16_and_with_mup(options):
    if DEV and "use_mup" in options:
        pytest.skip("stock's model with muP crashes on the dev branch")
    dtype = options.get("params_dtype", torch.float32)
    assert_alike(*of_both(lambda: build(2, True, **options).to(dtype)), tolerance=1e-3)


@on_one_rank
@pytest.mark.skipif(DEV, reason="stock's model there names an argument that Megatron-Bridge's wrapper lacks")
def test_with_an_adapter():
    with under_the_names_of_bridge():
        assert_alike(*of_both(lambda: with_adapter(build(2))))


@on_one_rank
def test_outside_of_training_nothing_is_looked_for(monkeypatch):
    from shim.ops import Largest

    asked, like = [], Largest.like
    monkeypatch.setattr(Largest, "like", lambda *args: asked.append(args) or like(*args))
    rows, labels = rows_of()
    for model, times in ((build(1), 2), (build(1).eval(), 0), (build(), 0)):
        asked.clear()
        with patched():
            model(rows, rows, None, labels=labels)
        assert len(asked) == times
