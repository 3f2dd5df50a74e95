"""A body that is not known takes away only its part of a patch, if the patch can do without it."""

import logging
from dataclasses import replace

import pytest
from unit_helpers import BROKEN, MATRIX, PATCH, write_file

import shim
from shim._errors import NotMetError
from shim._planning.bodies import Bodies
from shim._planning.evidence import CANNOT_RUN, FIXED, Proved, digest_of_bodies, trial_of
from shim._planning.lock import locked
from shim._planning.match import match
from shim._planning.plan import make_plan
from shim._planning.requirements import enforce

FORWARD, ROLL = "megatron.core.roll:Layer.forward", "megatron.core.roll:roll"
WRONG = "layers roll past the end"
PARTIAL = MATRIX.replace(
    f'targets: ["{ROLL}", "{FORWARD}"]', f'targets: ["{ROLL}", {{target: "{FORWARD}", without: {WRONG}}}]'
)
EDITED = BROKEN.replace("return roll(x)", "return roll(x) + 1")
MISSING = BROKEN.replace("class Layer:\n        def forward", "class Layer:\n        def run")
OTHER = BROKEN.replace("return helper(x)", "return helper(x) + 1")
BOTH = EDITED.replace("return helper(x)", "return helper(x) + 1")


@pytest.fixture
def partial(world, monkeypatch):
    assert PARTIAL != MATRIX
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    world.pin(PARTIAL)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    yield world
    shim.revert()


def roll(world, **arguments):
    return world.plan(**arguments)["roll-fix"]


@pytest.mark.parametrize("text", [EDITED, MISSING])
def test_the_rest_is_applied(partial, text):
    """The reason names what is left out, and the digest covers what is bound."""
    found = roll(partial.install(text))
    assert (found.action, found.variant, found.targets) == ("apply", "old", (ROLL,))
    assert list(found.dropped) == [FORWARD] and FORWARD not in found.fingerprints
    assert "does without Layer.forward, of which the body is not known" in found.reason
    assert "shim pin --prove" in found.remedy


def test_the_text_of_a_plan_says_what_is_left(partial):
    """Not only with -v: a remedy alone would say nothing."""
    assert f"beside it: {FORWARD} is left as it is, since its body is not known: {WRONG}" in str(
        partial.install(EDITED).plan()
    )


@pytest.mark.parametrize("text", [OTHER, BOTH])
def test_a_body_that_the_patch_needs_takes_all_of_it(partial, text):
    assert roll(partial.install(text)).action == "drifted"


def test_a_version_that_is_said_to_be_right_gets_no_part(partial):
    """Whether it needs the patch at all is not known."""
    assert roll(partial.install(EDITED, "0.18.0")).action == "drifted"


@pytest.mark.parametrize(
    "demand", [{"require": ["roll-fix"]}, {"strict": True}, {"on_drift": "error"}], ids=["require", "strict", "error"]
)
def test_who_demands_the_patch_gets_all_of_it_or_an_error(partial, demand):
    partial.install(EDITED)
    with pytest.raises(NotMetError, match=r"can be applied only in part, without .*Layer\.forward"):
        enforce(partial.plan(**demand))
    enforce(partial.plan())


def test_drifted_bodies_can_be_bound_on_demand(partial):
    """If the signature fits."""
    partial.install(EDITED)
    found = roll(partial, on_drift="apply")
    assert found.targets == (ROLL, FORWARD) and not found.dropped and FORWARD in found.fingerprints
    assert found.unseen and not roll(partial.install(BROKEN), on_drift="apply").unseen
    assert roll(partial.install(MISSING), on_drift="apply").targets == (ROLL,)


def test_a_lock_knows_that_a_part_has_drifted(partial):
    before = locked(partial.install(BROKEN).plan())
    after = locked(partial.install(EDITED).plan())
    assert before["drifted"] == [] and "roll-fix" in after["drifted"]
    assert FORWARD in before["patches"]["roll-fix"]["fingerprints"]
    assert FORWARD not in after["patches"]["roll-fix"]["fingerprints"]


def test_the_report_says_what_is_left_and_a_warning_what_stays_wrong(partial, caplog):
    """What is left is upstream's own function, before and after."""
    partial.install(EDITED)
    (partial.site / "megatron/core/__init__.py").write_text("")
    with caplog.at_level(logging.WARNING, "shim"):
        shim.apply(only=["roll-fix"])
    import megatron.core.roll as module

    stock = module.Layer.forward
    found = shim.status()["roll-fix"]
    assert found.state == "applied" and found.is_partial
    assert found.targets == {ROLL: "bound", FORWARD: "drifted"}
    assert (
        shim.status().text().startswith("1 patch applied, 1 of them in part; ") and " (in part)" in shim.status().text()
    )
    assert shim.plan(only=["roll-fix"]).text().startswith("1 patch applies, 1 of them in part; ")
    assert found.to_dict()["in_part"] and not shim.status()["faster-forward"].to_dict()["in_part"]
    assert found.others == (f"{FORWARD} is left as it is, since its body is not known: {WRONG}",)
    [text] = [record.getMessage() for record in caplog.records if "applied without" in record.getMessage()]
    assert f"If this tree needs it: {WRONG}. Remedy: let the proofs decide" in text
    shim.revert()
    assert module.Layer.forward is stock


def test_proofs_that_show_nothing_leave_the_part_out(partial):
    """As without the lock."""
    plan = partial.install(EDITED).plan()
    found = match(plan.matrix.patches["roll-fix"], plan.environment, plan.matrix)
    said = Proved(CANNOT_RUN, "old", digest_of_bodies(found.fingerprints), "no proof", "2026-01-02")
    again = match(plan.matrix.patches["roll-fix"], plan.environment, plan.matrix, said)
    assert again.state == "apply" and list(again.dropped) == [FORWARD]


def proved_without(world, *targets):
    """What the proofs have shown of an edited release, without these targets."""
    plan = world.install(BOTH).plan()
    entry = plan.matrix.patches["roll-fix"]
    bodies = Bodies(entry, plan.environment, plan.matrix).of(entry.variants["old"])
    said = Proved(FIXED, "old", digest_of_bodies(bodies), "1e-1 -> 0", "2026-01-02", dropped=targets)
    return match(entry, plan.environment, plan.matrix, said)


def test_what_no_proof_ran_is_left_out_of_what_was_proved(partial):
    found = proved_without(partial, FORWARD)
    assert found.state == "apply" and "proved on this tree" in found.reason
    assert found.dropped == {FORWARD: "its proofs do not run it"}
    assert not proved_without(partial).dropped


def test_a_lock_cannot_take_away_a_body_that_the_patch_needs(partial):
    assert not proved_without(partial, ROLL, ["no name"]).dropped


@pytest.mark.parametrize(("text", "left"), [(MISSING, ()), (EDITED, (FORWARD,))], ids=["missing", "not run"])
def test_a_trial_asks_for_the_parts_that_are_there(partial, text, left):
    """Its process requires the patch, so that one that is not applied is told."""
    plan = partial.install(text).plan(require=["roll-fix"])
    trial = replace(plan.options, trial=trial_of({"roll-fix": "old"}, {"roll-fix": left}))
    tried = make_plan(plan.environment, plan.matrix, trial, plan.losses)
    enforce(tried)
    assert tried["roll-fix"].targets == (ROLL,)
