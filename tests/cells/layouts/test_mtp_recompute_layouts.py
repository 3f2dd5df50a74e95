"""Patch mtp-recompute over ranks: context parallelism, distributed activations, pipeline stages and their schedules.

Functions named `..._in_rank` run in every rank of a pool at once; what they return is judged in the test. Tensor and
sequence parallelism by themselves are in test_mtp_recompute.
"""

import contextlib
from functools import partial

import pytest
import recompute_cases
import torch
from megatron.core import tensor_parallel
from recompute_cases import METHODS, RECOMPUTED, all_pairs, equal_bits
from thorough import times

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ID, PACKED = "mtp-recompute", "mtp-packed-sequences"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
# Lengths and alignment that context parallelism can share out; None is one sequence without packed_seq_params.
ROWS = {"unpacked": ((16,), None), "plain": ((8, 16, 8), 1), "padded": ((5, 13, 3), 8)}
CP2, TP2, PP2 = Layout(cp=2), Layout(tp=2), Layout(pp=2)

puts_mtp_anywhere = pytest.mark.skipif(VERSION < (0, 16), reason="MTP is on the last stage only before 0.16")


row_of = partial(recompute_cases.row_of, ROWS)
CASES = all_pairs(method=METHODS, row=ROWS, layers=(1, 2), dropout=(0.0, 0.1), lora=(False, True))


@contextlib.contextmanager
def in_layout(layout, shimmed=True):
    """A rank's surroundings: CPU substitutions, the patches or stock, and the layout."""
    patched = shim.patched(only=[PACKED, ID], require=[ID]) if shimmed else contextlib.nullcontext()
    with testing.megatron_on_cpu(), patched, testing.layout_initialised(layout):
        yield


def build(method=None, layers=2, dropout=0.0, lora=False, **model):
    """What a rank holds of a model with full recompute by `method`, or with none."""
    options = {"mtp_num_layers": layers, "hidden_dropout": dropout, **METHODS.get(method, {}), **model}
    if not method:
        options.pop("distribute_saved_activations", None)
    stages = testing.build_chunks(**options)
    for stage in stages:
        if lora:
            testing.add_lora(stage)
            if stage.pre_process:  # as trainers do: otherwise the decoder's recompute trains none of its adapters
                stage.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        for name, module in stage.named_modules():
            if name.endswith("core_attention") and dropout:
                module.register_forward_hook(partial(_drop_attention, dropout))
    return stages


def _drop_attention(dropout, module, inputs, output):
    """As the release's attention does it: in the tracker's own random state, another on every rank."""
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return torch.nn.functional.dropout(output, dropout)


def train(run, stages, rows, **options):
    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    return run(stages, rows, **options)


def calls_of(stages):
    """Per MTP layer on this rank a list that grows by whether gradients are enabled, whenever its layer runs."""
    calls = []
    for stage in stages:
        for layer in stage.mtp.layers if stage.mtp_process else ():
            seen = []
            inner = getattr(layer, "mtp_model_layer", None) or layer.transformer_layer
            inner.register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
            calls.append(seen)
    return calls


def same_in_rank(layout, cases, model, shimmed=True):
    """Cases in which recompute changes a bit of this rank's results, does not happen, or nothing was compared."""
    wrong = []
    with in_layout(layout, shimmed):
        for case in cases:
            options = {name: value for name, value in case.items() if name not in ("method", "row")} | model
            row, again = row_of(case["row"]), build(case["method"], **options)
            calls = calls_of(again)
            expected = [[False, True] if x else [True] for x in RECOMPUTED[case["method"]]][: options["layers"]]
            results = [train(testing.run_packed, stages, row) for stages in (build(**options), again)]
            if not ((results[0].grads or results[0].mtp) and equal_bits(*results)) or calls not in ([], expected):
                wrong.append((case, testing.differences(*results), calls))
    return wrong


DISTRIBUTED = {"distribute_saved_activations": True}


# Stock is wrong


def stock_in_rank(layers):
    case = {"method": "uniform 1", "row": "unpacked", "layers": layers}
    return same_in_rank(TP2, [case], DISTRIBUTED, shimmed=False)


@pytest.mark.skipif(VERSION < (0, 14), reason="stock recomputes no MTP layer before 0.14")
def test_stock_cuts_the_tensor_that_its_caller_still_needs():
    """With two layers: what the first one gave is cut by the second one's checkpoint, and then put beside others. A
    pool of its own, because ranks that fail are no use to other tests."""
    with testing.Ranks(2) as ranks, pytest.raises(testing.RankError, match=r"number of dimensions|padding_mask"):
        ranks.run(stock_in_rank, 2)


# No bit changes


def test_recompute_changes_no_bit_under_context_parallelism(ranks2):
    """What is run again in backward exchanges keys and values over ranks once more, in the same order on each."""
    assert ranks2.run(same_in_rank, CP2, CASES, {}) == [[], []]


def test_distributed_activations_change_no_bit(ranks2):
    """Each rank keeps a part of the first saved tensor, which is gathered in backward; the layer's caller, who puts the
    same tensor into its own output, keeps all of it. Not together with sequence parallelism: the config says so."""
    assert ranks2.run(same_in_rank, TP2, CASES, DISTRIBUTED) == [[], []]


def distributed_in_rank():
    """Bytes that the first MTP layer's checkpoint keeps, without and with distribution."""
    with in_layout(TP2):
        found = []
        for options in ({}, DISTRIBUTED):
            stages, kept, original = build("uniform 1", layers=1, **options), [], tensor_parallel.checkpoint

            def spy(function, distribute, *values):
                output = original(function, distribute, *values)
                kept.append([value.numel() * value.element_size() for value in values if value is not None])
                return output

            tensor_parallel.checkpoint = spy
            try:
                train(testing.run_packed, stages, row_of("padded"))
            finally:
                tensor_parallel.checkpoint = original
            found.append(kept[-1])  # the decoder's come before
        return found


def test_distributed_activations_are_really_cut(ranks2):
    """hidden_states is one of two tensors, and each rank keeps half of it."""
    for whole, cut in ranks2.run(distributed_in_rank):
        size = 32 * 32 * 4  # tokens, hidden size, bytes
        assert whole == [size, size] and cut == [size // 2, size]


# Pipeline stages


# Two decoder layers on each stage: uniform chunks of two run past the end of fewer, upstream and up to 0.16.
EVEN_STAGES = {"num_layers": 4}
STAGES = all_pairs(method=METHODS, row=ROWS, layers=(1, 2), lora=(False, True))


def test_recompute_changes_no_bit_on_the_last_stage(ranks2):
    assert ranks2.run(same_in_rank, PP2, STAGES, {"dropout": 0.1, **EVEN_STAGES}) == [[], []]


def with_layout(ranks, decoder_layers, layout):
    cases = [case for case in STAGES if case["layers"] == 2][:: times(2, 1)]
    model = {"num_layers": decoder_layers, "pipeline_model_parallel_layout": layout}
    return ranks.run(same_in_rank, PP2, cases, model)


@puts_mtp_anywhere
def test_recompute_changes_no_bit_with_mtp_on_the_first_stage(ranks2):
    """Method block counts from the first MTP layer, wherever that is."""
    assert with_layout(ranks2, 2, "Ettmm|L") == [[], []]


# Up to how many tokens a row is padded.
MICROBATCHES = [((5, 7, 4), 4, 20), ((6, 8, 4), 2, 20), ((18,), 1, 20), ((1, 9, 3), 4, 20)]


def scheduled_in_rank(layout, method, dropout, model):
    """Whether a scheduled step over several rows gives the same bits, and how often which MTP layer ran."""
    with in_layout(layout):
        rows = [
            testing.pack(testing.random_sequences(lengths, seed=number), align=align, total=total)
            for number, (lengths, align, total) in enumerate(MICROBATCHES)
        ]
        again = build(method, dropout=dropout, **model)
        calls = calls_of(again)
        results = [train(testing.run_schedule, stages, rows) for stages in (build(dropout=dropout, **model), again)]
        return bool(results[0].grads) and equal_bits(*results), [sorted(seen) for seen in calls]


SCHEDULED = [("uniform 2", 0.0), ("block 1", 0.1), ("uniform 1", 0.1), ("block 2", 0.0)]


@pytest.mark.parametrize(("method", "dropout"), times(SCHEDULED[:2], SCHEDULED))
def test_1f1b_changes_no_bit(ranks2, method, dropout):
    """Backward of one row runs between the forwards of others, and draws the numbers of its own forward."""
    (same, none), (last, calls) = ranks2.run(scheduled_in_rank, PP2, method, dropout, EVEN_STAGES)
    times = len(MICROBATCHES)
    assert same and last and not none
    assert calls == [[False] * times * x + [True] * times for x in RECOMPUTED[method]]
