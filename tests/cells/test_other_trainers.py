"""SkyRL, Megatron-Bridge, NeMo-RL, slime, Primus, MindSpeed and wrapt beside shim, by what they bind.

What they bind is written anew in trainers_in_small. For each of them, in both orders: the truth holds, check() says
what is true, the digest is that of shim alone, and revert in both orders gives every name back.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import trainers_in_small as trainers
from thorough import times
from trainer_cases import (
    BIAS,
    COUNTS_PADDING,
    PACKED,
    RECOMPUTE,
    ROPE_ID,
    VERSION,
    Together,
    alone,
    biased_model,
    holds,
    packed_equals_alone,
    padding_does_not_count,
    recompute_equals_none,
    rotation_is_per_token,
    row_of,
    undoing,
)
from trainers_in_small import GPT, MTP, RANDOM, ROPE, ROUTER

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.15.3": "all"}

ABOUT = []  # the patches, see chosen.py


@dataclass(frozen=True)
class Case:
    """How a trainer meets a patch.

    target: the target that the trainer binds, and what the report says of it then ("bound": it binds none).
    truth: what holds with shim.    stock: whether it holds with the trainer alone, too.
    """

    bind: Callable
    patch: str
    target: str
    state: str
    truth: Callable
    stock: bool
    since: tuple = (0, 12)
    until: tuple = (9, 9)


LAYER = f"{MTP}:MultiTokenPredictionLayer._checkpointed_forward"
STEP = f"{GPT}:GPTModel._postprocess"
ROTATE = f"{ROPE}:apply_rotary_pos_emb"
COUNT = f"{ROUTER}:TopKRouter._apply_expert_bias"
ROLL = f"{MTP}:" + ("roll_tensor" if VERSION < (0, 16) else "_roll_tensor_packed_seq")
CASES = {
    "SkyRL, expert bias": Case(
        trainers.skyrl_expert_bias, BIAS, COUNT, "called", padding_does_not_count, True, (0, 16)
    ),
    "Megatron-Bridge, expert bias": Case(
        trainers.bridge_expert_bias, BIAS, COUNT, "called", padding_does_not_count, True, (0, 16)
    ),
    "NeMo-RL, forward": Case(trainers.nemo_forward, PACKED, ROLL, "bound", packed_equals_alone, False, (0, 14)),
    "NeMo-RL, step": Case(trainers.nemo_step, PACKED, STEP, "called", packed_equals_alone, False, (0, 14)),
    "slime, gradients": Case(
        trainers.slime_coalesced_gradients, PACKED, ROLL, "bound", packed_equals_alone, False, (0, 14)
    ),
    "Primus, recompute": Case(
        trainers.primus_recompute, RECOMPUTE, LAYER, "called", recompute_equals_none, False, (0, 14)
    ),
    "Primus, head": Case(trainers.primus_chunked_head, PACKED, STEP, "called", packed_equals_alone, False, (0, 14)),
    "MindSpeed, rope": Case(trainers.mindspeed_rope, ROPE_ID, ROTATE, "called", rotation_is_per_token, False),
    "MindSpeed, checkpoints": Case(
        trainers.mindspeed_around_everything,
        "fp8-fp4-recompute",
        f"{RANDOM}:checkpoint",
        "called",
        recompute_equals_none,
        False,
        (0, 14),
    ),
    "wrapt, rope": Case(
        trainers.wrapt_around(ROPE, "apply_rotary_pos_emb"), ROPE_ID, ROTATE, "called", rotation_is_per_token, False
    ),
    "wrapt, step": Case(
        trainers.wrapt_around(GPT, "GPTModel._postprocess"),
        PACKED,
        STEP,
        "called",
        packed_equals_alone,
        False,
        (0, 14),
    ),
}
# On a release that has fixed the bias, a trainer's own fix of it raises, with shim or without.
HERE = {
    name: case
    for name, case in CASES.items()
    if case.since <= VERSION <= case.until and (case.patch != BIAS or COUNTS_PADDING)
}
of_each_trainer = pytest.mark.parametrize("case", HERE.values(), ids=HERE)
in_both_orders = pytest.mark.parametrize("first", ["shim", "trainer"])


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


# Each trainer


@of_each_trainer
def test_what_the_trainer_has_alone(case):
    """Where the truth holds without shim, shim makes the trainer's patch unnecessary, or the trainer shim's."""
    with undoing() as undo:
        case.bind(undo, [])
        assert holds(case.truth) == case.stock


@in_both_orders
@of_each_trainer
def test_both_have_their_effect_and_the_report_says_so(case, first):
    with Together(case.bind, first) as both:
        assert case.truth()
        report = shim.check()
        assert both.seen or case.state == "bound", "the trainer's function did not run"
        found = report[case.patch]
        assert (found.state, found.targets[case.target]) == ("applied", case.state), found.reason
        assert report.digest == alone().digest
        if case.state == "called":
            assert any("trainers_in_small.py" in text for text in found.others), found.others
        others = {id for id in report if report[id].state != alone()[id].state}
        assert not others, str(report)


# Who came first, and who goes: every day the one who is not on top, whose function the other's holds.
ENDS = [("shim", "shim"), ("trainer", "trainer"), ("shim", "trainer"), ("trainer", "shim")]


@pytest.mark.parametrize(("first", "goes"), ENDS[: times(2, 4)])
@of_each_trainer
def test_who_goes_takes_all_of_its_own_along(case, first, goes):
    with Together(case.bind, first) as both:
        if goes == "shim":
            shim.revert()
            assert holds(case.truth) == case.stock, "what shim left is in force"
            both.undo.undo()
        else:
            both.undo.undo()
            shim.status()
            assert holds(case.truth), "what the trainer left is in the way"
            shim.revert()
        assert both.strangers() == []


# SkyRL: a loss of its own for MTP


def captured(row, alone, **options):
    """The states of the MTP layer at the tokens of a row [n, h], and the gradients of their squares by name."""
    model = testing.build_gpt(mtp_num_layers=1, **options)
    capture, found = trainers.SkyrlCapture(model), []
    for start, length in row.spans if alone else [(0, row.total)]:
        ids, places = row.input_ids[:, start : start + length], row.position_ids[:, start : start + length]
        given = {} if alone else {"packed_seq_params": row.packed_seq_params()}
        found.append(capture.states(ids, places, None, labels=ids, **given)[:, 0])
    states = torch.cat(found)
    if not alone:
        states = torch.cat([states[start : start + length] for start, length in row.spans])
    states.square().sum().backward()
    return states.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def close(one, other):
    assert torch.allclose(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert one[1].keys() == other[1].keys() and all(".mtp." in f".{name}" for name in one[1])
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], rtol=1e-4, atol=1e-5), name


@pytest.mark.skipif(VERSION < (0, 17), reason="process_mtp_loss came with 0.17")
@in_both_orders
def test_skyrl_may_replace_the_loss_of_mtp(first):
    """The patch does without that function, and says what that costs; packed rows with padding equal sequences alone.

    Under full recompute too, for which SkyRL switches the layer to evaluation otherwise.
    """
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with Together(trainers.skyrl_no_mtp_loss, first) as both:
        row = row_of()
        truth = captured(row, alone=True)
        close(captured(row, alone=False), truth)
        close(captured(row, alone=False, **full), truth)
        assert both.seen
        found = shim.check()[PACKED]
        assert found.state == "applied", found.reason
        assert found.targets[f"{MTP}:process_mtp_loss"] in ("left", "lost") and found.targets[ROLL] == "bound"
        assert any("skyrl_no_mtp_loss" in text and "without a loss mask" in text for text in found.others)
        assert shim.status().digest == alone().digest
        both.undo.undo()
        assert shim.status()[PACKED].targets[f"{MTP}:process_mtp_loss"] == "bound" and packed_equals_alone()
        shim.revert()
        assert both.strangers() == []


@pytest.mark.skipif(VERSION < (0, 17), reason="process_mtp_loss came with 0.17")
def test_skyrl_alone_moves_tokens_across_padding():
    """Without shim the rows of its own loss are wrong. Its switch to evaluation is for what stock refuses."""
    with undoing() as undo:
        trainers.skyrl_no_mtp_loss(undo, [])
        row = row_of()
        packed, truth = (captured(row, alone=alone)[0] for alone in (False, True))
        assert (packed - truth).abs().max() > 1e-3


# Primus: another class


@pytest.mark.skipif(not COUNTS_PADDING, reason="padding counts from 0.16 to 0.19")
@in_both_orders
@pytest.mark.parametrize("goes", ["shim", "trainer"])
def test_primus_may_replace_a_class_by_a_subclass(first, goes):
    """The method that shim has bound is the one that the subclass inherits."""
    with Together(trainers.primus_router, first) as both:
        assert padding_does_not_count() and both.seen
        assert (shim.check()[BIAS].state, shim.status()[BIAS].targets) == ("applied", {COUNT: "bound"})
        router = importlib.import_module(ROUTER).TopKRouter
        assert "_apply_expert_bias" not in vars(router), "it is bound on the subclass, not on upstream's class"
        if goes == "shim":
            shim.revert()
            assert not holds(padding_does_not_count)
        both.undo.undo()
        shim.revert()
        assert both.strangers() == []


# MindSpeed: patched again for each engine


@in_both_orders
def test_mindspeed_may_take_its_patches_back_and_make_them_again(first):
    with Together(trainers.mindspeed_rope, first) as both:
        for _ in range(2):
            both.undo.undo()
            assert shim.status()[ROPE_ID].targets[ROTATE] == "bound" and rotation_is_per_token()
            both.bind(both.undo, both.seen)
            assert shim.status()[ROPE_ID].targets[ROTATE] == "called" and rotation_is_per_token()
        shim.revert()
        assert not rotation_is_per_token()
        both.undo.undo()
        assert both.strangers() == []


# A replacement, and what the report says to do


@pytest.mark.skipif(not COUNTS_PADDING, reason="padding counts from 0.16 to 0.19")
@in_both_orders
@pytest.mark.parametrize("follows", ["remove", "exclude"])
def test_a_replacement_is_a_conflict_whose_remedy_works(first, follows):
    def in_its_place(undo, seen):
        def _apply_expert_bias(self, routing_map, padding_mask=None):
            seen.append("replaced")
            self.local_tokens_per_expert += routing_map.sum(0)  # padding, too

        undo.set(importlib.import_module(ROUTER).TopKRouter, "_apply_expert_bias", _apply_expert_bias)

    with Together(in_its_place, first) as both:
        assert shim.check()[BIAS].remedy.startswith("call shim.check(model)")
        found = shim.check(biased_model())[BIAS]
        assert found.state == "conflict" and "in_its_place" in found.reason and "in_its_place" in found.remedy
        assert re.search(rf"remove .*, or keep it and exclude {BIAS}", found.remedy)
        if follows == "remove":
            both.undo.undo()
            assert shim.check()[BIAS].state == "applied" and padding_does_not_count()
        else:
            assert shim.apply(exclude=[BIAS])[BIAS].state == "excluded"
            holds(padding_does_not_count)
            assert both.seen, "the replacement is not in force"
            both.undo.undo()
        shim.revert()
        assert both.strangers() == []
