"""Functions of trainers in the place of megatron-core's: both orders end alike in value, and the report says the same.

They are written anew in replacements_in_small.
"""

import importlib

import pytest
import replacements_in_small as trainers
import torch
from trainer_cases import PACKED, Together, alone, row_of, undoing
from trainers_in_small import GPT, MTP, ROPE

import shim
from shim import testing
from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import after_files_were_loaded, after_weights_were_loaded
from shim.patches.megatron_core.mrope_thd.proof import LENGTHS, error, packed, unpacked
from shim.testing import Layout

CELLS = {"0.16.0": "all"}

ABOUT = ["cpu-offloaded-optimizer", "mtp-packed-sequences", "rope-thd", "mrope-thd"]  # the patches, see chosen.py

OFFLOADED, ROWS, MROPE = "cpu-offloaded-optimizer", "rope-thd", "mrope-thd"
STEP, ROLL = f"{GPT}:GPTModel._postprocess", f"{MTP}:_roll_tensor_packed_seq"
in_both_orders = pytest.mark.parametrize("first", ["shim", "trainer"])
VARIANTS = {id: shim.plan()[id].variant for id in (OFFLOADED, PACKED, ROWS, MROPE)}


# A target that the patch can do without


@pytest.mark.skipif(VARIANTS[OFFLOADED] in (None, "v0_20"), reason="the release updates its copies itself")
@in_both_orders
def test_one_replaced_target_leaves_the_others_of_the_offloaded_optimizer(one_rank, first):
    importlib.import_module(trainers.HYBRID)
    with Together(trainers.roll_fp32_copies, first):
        found = shim.check()[OFFLOADED]
        assert found.state == "applied" and any(
            trainers.name_of(trainers.roll_fp32_copies) in text for text in found.others
        )
        assert after_weights_were_loaded(aware=False, fraction=1.0) == 0
        assert after_weights_were_loaded(aware=True, fraction=1.0) == 0
        assert after_files_were_loaded(aware=True, fraction=1.0) == 0
        assert shim.status().digest == alone().digest


# A method that a model can try


def gradient_error():
    """Of a padded row with multi-token prediction, packed against alone, over the norm of all; and the model."""
    model = testing.build_gpt(mtp_num_layers=1)
    results = [run(model, row_of()) for run in (testing.run_packed, testing.run_alone)]
    found, truth = (torch.cat([grad.flatten() for grad in result.grads.values()]) for result in results)
    return float((found - truth).norm() / truth.norm()), model


stepped = pytest.mark.skipif(VARIANTS[PACKED] in (None, "v0_12", "v0_14"), reason="the roll takes no packed row there")


@stepped
@in_both_orders
def test_a_step_of_a_trainers_own_trains_right_and_is_called_right(one_rank, first):
    """Its roll is upstream's, which the patch has fixed. `require` does not raise, and nothing is to be removed."""
    with undoing() as undo:
        trainers.roll_step(undo, [])
        assert gradient_error()[0] > 1e-3, "stock has become right"
    with Together(trainers.roll_step, first) as both:
        shim.apply(require=[PACKED])
        found, model = gradient_error()
        assert both.seen and found < 1e-6
        report = shim.check(model)[PACKED]
        assert report.state == "applied" and trainers.name_of(trainers.roll_step) in " ".join(report.others)
        assert report.targets[ROLL] == "bound" and "remove" not in report.remedy
        assert shim.status()[PACKED] == report


@stepped
@in_both_orders
def test_a_step_that_trains_wrong_is_a_conflict(one_rank, first):
    with Together(trainers.wrong_step, first):
        shim.apply(require=[PACKED])
        found, model = gradient_error()
        assert found > 1e-3
        with pytest.raises(shim.NotMetError, match=trainers.name_of(trainers.roll_step)):
            shim.check(model)
        found = shim.status()[PACKED]
        assert found.state == "conflict" and f"{STEP} is replaced by" in found.reason and "remove" in found.remedy


@stepped
@in_both_orders
def test_embeddings_of_a_trainers_own_lead_to_the_roll(one_rank, first):
    with Together(trainers.roll_embeddings, first) as both:
        found, model = gradient_error()
        assert both.seen and found < 1e-6
        assert shim.check(model)[PACKED].state == "applied"


# A public function that no longer leads to what is patched


@pytest.mark.skipif(VARIANTS[ROWS] is None, reason="the release rotates packed rows without a loop")
@in_both_orders
def test_a_rotation_that_does_not_lead_there_leaves_nothing_applied(one_rank, first):
    """rope-thd tries it, and cannot tell: it takes no table of positions, or other modules still hold upstream's."""
    with Together(trainers.roll_rotation, first) as both:
        report = shim.check()
        where = f"{ROPE}:apply_rotary_pos_emb"
        assert report[ROWS].state == "unknown" and f"{where} is replaced by" in report[ROWS].reason
        assert ("still hold upstream's" if first == "trainer" else "raised RuntimeError") in report[ROWS].reason
        if VARIANTS[MROPE] == "v0_16":
            assert report[MROPE].state == "conflict" and f"{where} was replaced by" in report[MROPE].reason
        both.undo.undo()
        assert shim.status()[ROWS].state == "applied"
        shim.revert()
        assert both.strangers() == []


# A function that a patch goes around


def on_two_ranks(function, *given):
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(cp=2)):
        return function(*given)


def cut_over(first):
    """How many ranks a trainer's own _preprocess sees, what the report says, and the losses of a packed row."""
    with Together(trainers.asking_preprocess, first) as both:
        shim.check()  # where shim came first, it notices here that it has to go around something else
        found = packed(LENGTHS, {"context_parallel_size": 2})
        return both.seen, shim.status()[MROPE], found


@pytest.mark.skipif(VARIANTS[MROPE] != "v0_16", reason="_preprocess is not handed a group before 0.16")
@in_both_orders
def test_a_preprocess_of_a_trainers_own_sees_its_ranks(ranks2, first):
    """And its table is whole: the embedding is upstream's."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        truth = unpacked(LENGTHS, {})
    results = ranks2.run(on_two_ranks, cut_over, first)
    assert [seen for seen, _, _ in results] == [[2], [2]]
    assert error([found for _, _, found in results], truth) <= 1e-5
    for _, report, _ in results:
        assert report.state == "applied" and trainers.name_of(trainers.asking_preprocess) in report.reason
        assert any(trainers.name_of(trainers.asking_preprocess) in text for text in report.others)
