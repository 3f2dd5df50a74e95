"""How the measurements of proofs become a verdict on a tree."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shim._planning.evidence import CANNOT_RUN, FIXED, LACKING, NOT_FIXED, RIGHT
from shim._proving import decide
from shim._proving.kept import Kept
from shim._proving.results import Outcome, Result
from shim._proving.run import Request
from shim._proving.worker import SideTask

BODY, HELPER, PART = (f"megatron.core.roll:{name}" for name in ("roll", "helper", "part"))
VARIANT = SimpleNamespace(targets=(BODY, PART), skippable={PART: "layers roll past the end"})


def side(state, *reached):
    return None if state is None else Outcome(state, state, value=1.0 if state == "wrong" else None, reached=reached)


def result(stock, patched=None, proof="first", reason="", reached=BODY, raised=False):
    """raised: whether stock is wrong by the error that the proof expects."""
    outcomes = side(stock, reached), side(patched)
    if raised:
        outcomes = replace(outcomes[0], value=math.inf), outcomes[1]
    return Result("roll-fix", proof, proof, "correctness", "silent", "cpu", "", reason, "apply", "old", *outcomes)


@pytest.fixture
def judge(monkeypatch):
    """The judgement of roll-fix, whose proof "second" is about the variant "new" only."""
    entry = SimpleNamespace(module="m", variants={"old": VARIANT, "new": VARIANT})
    proofs = [SimpleNamespace(name="first", variants=()), SimpleNamespace(name="second", variants=("new",))]
    # A stand-in for a module that imports torch: what is loaded counts as installed for the other tests.
    monkeypatch.setitem(sys.modules, "shim.testing.proof", SimpleNamespace(proofs_of=lambda module: proofs))
    plan = SimpleNamespace(matrix=SimpleNamespace(patches={"roll-fix": entry}))

    def judged(*results, variant="old", bodies=(BODY,), right=(BODY,)):
        watched = decide.Watched((), frozenset(bodies), frozenset(right))
        return decide._judged(plan, "roll-fix", variant, results, watched)

    judged.plan = plan
    return judged


@pytest.mark.parametrize(
    ("stock", "patched", "verdict"),
    [
        ("wrong", "right", FIXED),
        ("broken", "right", FIXED),  # another error than the proof expects, and gone with the patch
        ("wrong", "wrong", NOT_FIXED),
        ("wrong", "broken", NOT_FIXED),
        ("wrong", "cannot run", CANNOT_RUN),
        ("right", "right", RIGHT),
        ("right", "wrong", RIGHT),
        ("right", "broken", RIGHT),
        ("broken", "broken", CANNOT_RUN),
        ("broken", "wrong", CANNOT_RUN),
        ("cannot run", "cannot run", CANNOT_RUN),
    ],
)
def test_one_proof(judge, stock, patched, verdict):
    assert judge(result(stock, patched)).verdict == verdict


def test_no_proof_shows_nothing(judge):
    assert judge().verdict == CANNOT_RUN
    assert judge(result(None, reason="it needs a GPU")).shown == "it needs a GPU"


def test_a_fix_that_breaks_something_else_is_none(judge):
    """Each proof about the variant has to be right with the patch."""
    found = judge(result("wrong", "right"), result("right", "wrong", "second"), variant="new")
    assert (found.verdict, found.shown) == (NOT_FIXED, "right -> wrong")


def test_a_proof_about_another_variant_does_not_speak_against_this_one(judge):
    assert judge(result("wrong", "right"), result("broken", "broken", "second")).verdict == FIXED


@pytest.mark.parametrize(("variant", "verdict"), [("old", FIXED), ("new", NOT_FIXED)])
def test_nor_beside_all_other_patches(judge, monkeypatch, variant, verdict):
    alone = judge(result("wrong", "right"), variant="old")
    judged = {"roll-fix": replace(alone, variant=variant)}
    again = [result("wrong", "right"), result("wrong", "wrong", "second")]
    monkeypatch.setattr(decide, "prove", lambda plan, request, say: again)
    monkeypatch.setattr(decide, "_as_tried", lambda plan, variants: judge.plan)
    [found] = decide._together(judge.plan, judged, Request(), print).values()
    assert found.verdict == verdict


def test_a_tree_is_right_only_if_all_proofs_say_so(judge):
    """Also those about other variants: the tree may have the defect of another release."""
    found = judge(result("right", "right"), result("broken", "broken", "second"))
    assert found.verdict == CANNOT_RUN and "but of second" in found.shown
    found = judge(result("right", "right"), result("wrong", "wrong", "second"))
    assert found.verdict == NOT_FIXED


def lacking(proof="first"):
    return replace(result("cannot run", None, proof), stock=Outcome("cannot run", "it has no roll", lacks=True))


def test_a_tree_without_the_feature_has_no_defect(judge):
    """If every proof says so. One that cannot run for another reason may be about what the tree does have."""
    found = judge(lacking(), lacking("second"), right=[BODY, PART])
    assert (found.verdict, found.variant, found.shown) == (LACKING, None, "it has no roll")
    for other in (result("cannot run", None, "second"), result(None, proof="second", reason="it needs a GPU")):
        assert judge(lacking(), other).verdict == CANNOT_RUN


@pytest.mark.parametrize(
    ("stock", "patched", "verdict"),
    [("right", "right", RIGHT), ("wrong", "right", FIXED), ("wrong", "wrong", NOT_FIXED)],
)
def test_proofs_of_what_is_there_decide_beside_those_of_what_is_not(judge, stock, patched, verdict):
    assert judge(result(stock, patched), lacking("second"), variant="new").verdict == verdict


def test_a_proof_speaks_only_for_bodies_that_it_runs(judge):
    """The body of another function was changed, and no proof has called it."""
    found = judge(result("wrong", "right"), bodies=[HELPER])
    assert found.verdict == CANNOT_RUN and "do not run helper" in found.shown


@pytest.mark.parametrize("reached", [BODY, None])
def test_a_tree_is_right_only_by_proofs_that_run_its_bodies(judge, reached):
    """As if multi-token prediction waits for an argument of its own, or one of two updates is not called."""
    found = judge(result("right", "right", reached=reached), right=[BODY, PART])
    missed = "part" if reached else "part, roll"
    assert (found.verdict, found.variant) == (CANNOT_RUN, "old")
    assert found.shown == f"right, but its proofs do not run {missed}"
    both = result("right", reached=BODY), result("right", proof="second", reached=PART)
    assert judge(*both, right=[BODY, PART]).verdict == RIGHT


def test_what_runs_with_the_patch_alone_is_not_shown_to_be_right(judge):
    stock_misses = replace(result("right", "right", reached=None), patched=side("right", BODY))
    assert judge(stock_misses).verdict == CANNOT_RUN


def test_an_error_behind_the_one_that_the_proof_expects_shows_nothing(judge):
    """The patch takes away what stock raises. The stand-in for a GPU, or the tree, may lack what comes then."""
    found = judge(result("wrong", "broken", raised=True))
    assert found.verdict == CANNOT_RUN and found.shown == "with the patch the run gets past wrong, and ends in: broken"
    assert judge(result("wrong", "wrong", raised=True)).verdict == NOT_FIXED  # the same error, or another wrong value
    assert judge(result("wrong", "broken")).verdict == NOT_FIXED  # stock runs to the end
    worse = result("wrong", "broken", raised=True), result("right", "wrong", "second")
    assert judge(*worse, variant="new").verdict == NOT_FIXED


@pytest.mark.parametrize("variant", ["old", "new"])
def test_a_proof_without_a_result_speaks_for_no_body(judge, variant):
    """It calls the changed function, and breaks with the patch as well; or is about another variant."""
    broken = result("broken", "broken", "second", reached=HELPER)
    found = judge(result("wrong", "right"), broken, variant=variant, bodies=[HELPER])
    assert found.verdict == CANNOT_RUN and "do not run helper" in found.shown


def test_a_part_that_the_patch_can_do_without_is_left_if_no_proof_runs_it(judge):
    found = judge(result("wrong", "right"), bodies=[BODY, PART])
    assert (found.verdict, found.dropped) == (FIXED, (PART,))
    assert found.shown == "wrong -> right; without part, which its proofs do not run"
    refused = found.refused("beside all other patches wrong")
    assert (refused.verdict, refused.dropped) == (NOT_FIXED, ())


def test_with_a_body_that_the_patch_needs_no_part_is_accepted(judge):
    found = judge(result("wrong", "right"), bodies=[HELPER, PART])
    assert (found.verdict, found.dropped) == (CANNOT_RUN, ())
    assert found.shown == "its proofs do not run helper, part"


def test_a_patch_of_which_no_part_would_be_left_is_not_accepted(judge, monkeypatch):
    monkeypatch.setattr(VARIANT, "targets", (PART,))
    assert judge(result("wrong", "right"), bodies=[PART]).verdict == CANNOT_RUN


def test_a_patch_without_a_variant_for_the_tree_is_left_out_if_stock_is_wrong(judge):
    assert judge(result("wrong"), variant=None).verdict == NOT_FIXED
    assert judge(result("right"), variant=None).verdict == RIGHT


# ---- what an interrupted run has measured


TASK = SideTask("roll-fix stock", "m", "first", None)
ABOUT = {"torch": "2.13.0"}


def test_an_answer_is_kept_for_the_next_run(tmp_path):
    """Under the name of what was run, and not under that of the message."""
    Kept(tmp_path / "kept", ABOUT).keep(TASK, {"key": "a", "state": "right", "text": ""})
    again = Kept(tmp_path / "kept", ABOUT)
    assert again.answer(SideTask("another message", "m", "first", None))["state"] == "right"
    assert again.answer(SideTask("roll-fix with shim", "m", "first", ())) is None
    other = Kept(tmp_path / "kept", {"torch": "2.14.0"})
    assert other.answer(TASK) is None and len(other) == 0
    again.forget()
    assert len(Kept(tmp_path / "kept", ABOUT)) == 0


@pytest.mark.parametrize("state", ["hung", "died", "ended"])
def test_what_may_be_another_next_time_is_measured_again(tmp_path, state):
    kept = Kept(tmp_path / "kept", ABOUT)
    kept.keep(TASK, {"key": "a", "state": state, "text": ""})
    assert kept.answer(TASK) is None


@pytest.mark.parametrize("line", ["", "{", '{"task": 1}', "[]"])
def test_a_torn_line_is_measured_again(tmp_path, line):
    (tmp_path / "kept").write_text(line + "\n")
    assert Kept(tmp_path / "kept", ABOUT).answer(TASK) is None
