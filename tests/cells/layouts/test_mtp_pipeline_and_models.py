"""Patch mtp-packed-sequences where MTP has a stage of its own, and on given embeddings: packed equals alone there, too.

Other stages, layouts and models are drawn by test_drawn_steps.py. Functions named `..._in_rank` run in every rank of a
pool at once; what they return is judged in the test.
"""

import contextlib

import pytest
import torch
from thorough import times

import shim
from shim import testing
from shim.testing import Layout, oracle

CELLS = {"0.19.2": "all"}

ABOUT = []  # the patches, see chosen.py

ID = "mtp-packed-sequences"
# The sequences alone are recomputed as well, and they are not packed. A row's loss is divided by the row's count.
PATCHES = [ID, "mtp-recompute", "mtp-loss-cp"]
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
WITHIN_LAYOUT, ACROSS_LAYOUTS = 1e-6, 5e-6
PER_TOKEN = [False, True]
# Lengths, alignment, per-token loss: plain and padded rows, means and sums. Even shares for ranks that divide rows.
ROWS = [((5, 7, 4), 1, False), ((5, 7, 4), 4, True), ((1, 6, 2), 4, False)]
EVEN_ROWS = [((8, 12, 4), 1, True), ((5, 7, 4), 4, False), ((1, 6, 2), 4, True)]

puts_mtp_anywhere = pytest.mark.skipif(VERSION < (0, 16), reason="MTP is on the last stage only before 0.16")


@contextlib.contextmanager
def shimmed(layout):
    """A rank's surroundings: CPU substitutions, the patch, the layout."""
    with testing.megatron_on_cpu(), shim.patched(only=PATCHES, require=PATCHES), testing.layout_initialised(layout):
        yield


def row_of(lengths, align=1, **options):
    return testing.pack(testing.random_sequences(lengths), align=align, **options)


def worst_over(model, rows, **options):
    """The largest difference between packed and alone over rows, and the case that has it."""
    found = (0.0, None)
    for lengths, align, per_token in rows:
        row = row_of(lengths, align)
        given = {name: make(row) for name, make in options.items()}
        packed = testing.run_packed(model, row, per_token_loss=per_token, **given)
        alone = testing.run_alone(model, row, per_token_loss=per_token, **given)
        difference = testing.differences(packed, alone)
        value = testing.worst(difference)
        assert packed.grads, "no gradient at all was compared"
        if not value <= found[0]:  # NaN is not smaller than anything
            found = (value, (lengths, align, per_token, difference))
    return found


def assert_packed_equals_alone(results):
    for rank, (value, case) in enumerate(results):
        assert value <= WITHIN_LAYOUT, (rank, case)


# ---- pipeline stages, by hand: each rank runs its stages and passes on what comes out


def stages_in_rank(layout, rows, model):
    with shimmed(layout):
        stages = testing.build_chunks(sequence_parallel=layout.sequence_parallel, **model)
        return worst_over(stages, rows)


# ---- the release's own schedules


# Lengths, alignment, and up to how many tokens the row is padded.
UNEVEN = [((5, 7, 4), 4, None), ((6, 8, 4), 1, None), ((1, 6, 2), 4, None), ((10,), 1, None)]


def scheduled_in_rank(layout, rows, model, surroundings=shimmed):
    """The largest difference between a scheduled step over all rows and the rows' sequences alone."""
    with surroundings(layout):
        stages = testing.build_chunks(**model)
        rows = [
            testing.pack(testing.random_sequences(lengths, seed=seed), align=align, total=total)
            for seed, (lengths, align, total) in enumerate(rows)
        ]
        found = {}
        for per_token in PER_TOKEN:
            together = testing.run_schedule(stages, rows, per_token_loss=per_token)
            alone = [testing.run_alone(stages, row, per_token_loss=per_token) for row in rows]
            assert together.grads and len(together.main) in (0, sum(row.total for row in rows))
            found[per_token] = testing.differences(together, summed(alone, 1 if per_token else len(rows)))
        return max((testing.worst(difference), str(found)) for difference in found.values())


def summed(results, divisor):
    """What one step over several rows gives: losses one behind another, logged losses and gradients summed up."""
    names = set().union(*(result.grads for result in results))
    return testing.Result(
        main=torch.cat([result.main for result in results]),
        mtp=[torch.cat(layer) for layer in zip(*(result.mtp for result in results), strict=True)],
        logged=torch.stack([result.logged for result in results]).sum(0),
        grads={name: sum(r.grads[name] for r in results if name in r.grads) / divisor for name in names},
    )


# ---- MTP on a stage of its own


ELSEWHERE = [(2, "Ettm|L", 1), (2, "Ettm|L", 2), (2, "Et|tmL", 2), (4, "Et|t|m|L", 2)]


def _elsewhere(layout, layers):
    """E embedding, t decoder layer, L loss, | between stages, m for all MTP layers."""
    layout = layout.replace("m", "m" * layers)
    return {"mtp_num_layers": layers, "pipeline_model_parallel_layout": layout}


@puts_mtp_anywhere
@pytest.mark.parametrize(("stages", "layout", "layers"), ELSEWHERE)
def test_packed_equals_alone_with_mtp_on_any_stage(request, stages, layout, layers):
    """The states of MTP layers travel on behind the main model's, and the last stage computes the loss."""
    ranks = request.getfixturevalue(f"ranks{stages}")
    model = _elsewhere(layout, layers)
    assert_packed_equals_alone(ranks.run(stages_in_rank, Layout(pp=stages), ROWS, model))


@puts_mtp_anywhere
def test_1f1b_trains_packed_rows_with_mtp_on_an_earlier_stage(ranks2):
    model = _elsewhere("Ettm|L", 2)
    assert_packed_equals_alone(ranks2.run(scheduled_in_rank, Layout(pp=2), UNEVEN, model))


# ---- no labels


def logits_in_rank(layout, model):
    """Logits of a packed row without labels, of the model and of one without MTP; None but on the last stage."""
    row = row_of((5, 7, 4), 4)
    with shimmed(layout):
        found = []
        for options in (model, {"num_layers": 2, "mtp_num_layers": None}):
            stage = testing.build_gpt(**options)
            if stage.post_process and stage.mtp_process:
                # Tied to the embedding that MTP has on this stage: the head's own weight is neither used nor trained.
                stage.output_layer.weight.data.fill_(float("nan"))
            found.append(_forward(stage, row))
        return found


def _forward(stage, row):
    outputs = []
    stage.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    with torch.no_grad(), oracle._Pipeline([stage]) as pipeline:
        pipeline.forward(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            attention_mask=None,
            labels=None,
            packed_seq_params=row.packed_seq_params(),
        )
    return outputs[0] if stage.post_process else None


@pytest.mark.skipif(VERSION > (0, 16), reason="later releases give logits themselves, and keep their own behaviour")
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", [None, "Ettm|L"], ids=["last", "earlier"])
def test_without_labels_the_last_stage_gives_logits(ranks2, layout, layers):
    """As a model without MTP gives them, whichever stage MTP is on; from the weights that are trained."""
    if layout and VERSION < (0, 16):
        pytest.skip("MTP is on the last stage only before 0.16")
    model = _elsewhere(layout, layers) if layout else {"mtp_num_layers": layers}
    first, last = ranks2.run(logits_in_rank, Layout(pp=2), model)
    assert first == [None, None]
    logits, expected = last
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=ACROSS_LAYOUTS, atol=ACROSS_LAYOUTS)


# ---- given embeddings


def embeddings_of(row, hidden_size=32):
    """[T, 1, h], as a vision tower's features among the tokens'."""
    return torch.randn(row.total, 1, hidden_size, generator=torch.Generator().manual_seed(row.total))


def embeddings_in_rank(layout, rows, model):
    with shimmed(layout):
        stages = testing.build_chunks(sequence_parallel=layout.sequence_parallel, **model)
        return worst_over(stages, rows, decoder_input=embeddings_of)


@pytest.mark.parametrize("layers", [1, 2])
def test_packed_equals_alone_on_given_embeddings(layers):
    """decoder_input in place of the embedded tokens, whose gradient counts: a vision tower is trained by it."""
    with shimmed(Layout()):
        row = row_of((5, 7, 4), 4)
        model = testing.build_gpt(mtp_num_layers=layers)
        result = testing.run_packed(model, row, decoder_input=embeddings_of(row))
        assert result.grads["decoder_input"][row.valid].any(-1).all()
        assert not result.grads["decoder_input"][~row.valid].any()
        value, case = worst_over(model, ROWS, decoder_input=embeddings_of)
        assert value <= WITHIN_LAYOUT, case


EMBEDDED = [Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(tp=2)]


@pytest.mark.parametrize("layout", times(EMBEDDED[:1], EMBEDDED), ids=str)
def test_packed_equals_alone_on_given_embeddings_in_parallel(ranks2, layout):
    assert_packed_equals_alone(ranks2.run(embeddings_in_rank, layout, EVEN_ROWS, {"mtp_num_layers": 2}))
