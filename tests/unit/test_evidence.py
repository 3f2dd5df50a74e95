"""What the proofs have shown on a tree decides about its bodies, and about no others."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from edited_trees import BODIES, EDITED, EDITED_AGAIN, proved, verdict
from unit_helpers import BROKEN, FIXED, REWORKED

import shim
from shim._errors import NotMetError, OptionError
from shim._matrix.load import load_matrix
from shim._planning.bodies import GONE
from shim._planning.evidence import CANNOT_RUN, LACKING, NOT_FIXED, RIGHT, evidence_for, files_of
from shim._planning.evidence import FIXED as IS_FIXED
from shim._planning.lock import read_lock, write_lock
from shim._planning.plan import make_plan
from shim._releases import sources as sources_module


@contextmanager
def nothing_parsed(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sources_module, "parse", lambda text: pytest.fail("a source was parsed"))
        yield


def write(world, said, also=()):
    part = proved(world, said)
    plan = world.plan()
    options = replace(plan.options, lock_content={"releases": {}, "proved": part})
    write_lock(world.lock, make_plan(plan.environment, plan.matrix, options, plan.losses), part, also)
    return world.lock


def roll(world):
    """The decision about the patch under the lock, which is not enforced by a plan."""
    return shim.plan(lock=world.lock)["roll-fix"]


def test_what_was_fixed_counts_as_known(tree):
    """Without the lock the same body has drifted."""
    assert tree.plan()["roll-fix"].action == "drifted"
    write(tree, verdict(tree, IS_FIXED))
    found = roll(tree)
    assert (found.action, found.variant) == ("apply", "old")
    assert found.reason == "proved on this tree (2026-01-02, 1e-1 -> 0)"
    assert "roll-fix" in shim.apply(lock=tree.lock).to_dict()["patches"]


@pytest.mark.parametrize("said", [IS_FIXED, RIGHT])
def test_a_body_that_has_changed_since_is_unknown_again(tree, said):
    """It is drifted, as without a lock, and the lock does not hold."""
    write(tree, verdict(tree, said, None if said == RIGHT else "old"))
    tree.install(EDITED_AGAIN)
    found = roll(tree)
    assert found.action == "drifted" and "proofs" not in found.reason
    with pytest.raises(NotMetError, match="differs from it"):
        shim.apply(lock=tree.lock)


def test_a_tree_that_was_right_needs_no_patch(tree):
    write(tree, verdict(tree, RIGHT, None))
    assert roll(tree).action == "upstream" and "proved on this tree" in roll(tree).reason


def test_what_was_not_fixed_is_left_out_also_if_asked_for(tree):
    """on_drift="apply" binds what nobody has seen; this was seen not to work."""
    write(tree, verdict(tree, NOT_FIXED))
    for on_drift in ("skip", "apply"):
        found = shim.plan(lock=tree.lock, on_drift=on_drift)["roll-fix"]
        assert found.action == "drifted" and "its proofs fail on this tree" in found.reason, on_drift
    assert "shim prove roll-fix" in found.remedy


def test_known_bodies_need_no_proof(tree):
    """Proofs that are right on stock may miss a defect that a release was seen to have."""
    tree.install(BROKEN)
    write(tree, verdict(tree, RIGHT, None))
    assert roll(tree).action == "apply" and "known" in roll(tree).reason


def test_a_proof_that_fails_with_the_patch_counts_for_known_bodies_as_well(tree):
    """The tree differs from the release in code that the patch neither binds nor reads."""
    tree.install(BROKEN)
    write(tree, verdict(tree, NOT_FIXED))
    found = roll(tree)
    assert found.action == "drifted" and found.reason == "its proofs fail on this tree (2026-01-02, 1e-1 -> 0)"


def test_where_proofs_show_nothing_the_tree_stays_unknown(tree, monkeypatch):
    """The bodies are in the lock, so no source is parsed. Who asks for drifted patches gets this one, too."""
    write(tree, verdict(tree, CANNOT_RUN))
    with nothing_parsed(monkeypatch):
        found = roll(tree)
    assert found.action == "drifted" and found.reason.endswith("; its proofs show nothing on this tree (1e-1 -> 0)")
    plan = shim.plan(lock=tree.lock, on_drift="apply")
    assert plan["roll-fix"].action == "apply" and "not known of patches on unknown bodies" in plan.numbers
    assert plan.numbers.endswith("as asked: roll-fix") and "has stock's bits" in shim.plan(lock=tree.lock).numbers
    rounds = replace(plan["roll-fix"], options={"rounding": True})
    told = replace(plan, decisions={**plan.decisions, "roll-fix": rounds}).numbers
    assert told.startswith("rounding differs from stock's, as asked: roll-fix; ") and told.endswith(plan.numbers)


def test_a_tree_that_lacks_the_feature_needs_no_patch(tree):
    write(tree, verdict(tree, LACKING, None))
    found = roll(tree)
    assert found.action == "not-needed" and "lacks what this patch fixes: seen on this tree" in found.reason


def test_a_tree_that_no_variant_fits_is_not_right(tree):
    """The proofs saw the defect, and had no variant to try."""
    write(tree, verdict(tree, NOT_FIXED, None))
    assert roll(tree).action == "drifted"


def test_the_part_without_which_a_patch_was_accepted_is_read(tree):
    write(tree, verdict(tree, IS_FIXED, dropped=[BODIES[1]]))
    [said] = evidence_for(read_lock(tree.lock), tree.plan().environment).values()
    assert said.dropped == [BODIES[1]]


def test_a_lock_holds_several_trees(tree):
    """The one that is installed is found by its version, and of two with one version by their files."""
    write(tree, verdict(tree, IS_FIXED))
    first = read_lock(tree.lock)
    tree.install(EDITED_AGAIN)
    write(tree, verdict(tree, NOT_FIXED), also=[first])
    assert roll(tree).action == "drifted" and "its proofs fail" in roll(tree).reason
    tree.install(EDITED)
    assert roll(tree).action == "apply" and shim.apply(lock=tree.lock)
    tree.install(EDITED.replace("+ 1", "+ 3"), "0.17.0")
    with pytest.raises(NotMetError, match=r"1 more tree in the lock"):
        shim.apply(lock=tree.lock)


@pytest.mark.parametrize("change", [{"variant": "none"}, {"variant": None}, {"fingerprints": {}}])
def test_an_edited_verdict_decides_nothing_else(tree, change):
    """A variant that does not exist, or other bodies: the tree is as unknown as it was."""
    lock = write(tree, verdict(tree, IS_FIXED))
    content = json.loads(lock.read_text())
    content["proved"]["patches"]["roll-fix"].update(change)
    lock.write_text(json.dumps(content))
    assert roll(tree).action == "drifted"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda proved: proved.update(more=1), "more"),
        (lambda proved: proved.pop("date"), "lacks 'date'"),
        (lambda proved: proved.update(date=1), "'date' of proved is no text"),
        (lambda proved: proved["patches"]["roll-fix"].update(verdict="perfect"), "'perfect' is no verdict"),
        (lambda proved: proved["patches"]["roll-fix"].update(variant=1), "'variant' of proved.patches.roll-fix"),
        (lambda proved: proved["patches"]["roll-fix"].update(code="import os"), "code"),
        (lambda proved: proved["patches"]["roll-fix"].update(dropped="roll"), "'dropped' of proved.patches.roll-fix"),
        (lambda proved: proved["patches"]["roll-fix"].update(otherwise="apply"), "'otherwise'"),
        (lambda proved: proved["files"].update({"megatron.core.roll": 1}), "is no mapping of mappings"),
    ],
)
def test_what_a_lock_may_hold_is_checked(tree, change, text):
    lock = write(tree, verdict(tree, IS_FIXED))
    content = json.loads(lock.read_text())
    change(content["proved"])
    lock.write_text(json.dumps(content))
    with pytest.raises(OptionError, match=text):
        read_lock(lock)


def test_further_trees_are_checked_as_well(tree):
    write(tree, verdict(tree, IS_FIXED), also=[{"format": 4}])
    with pytest.raises(OptionError, match=r"also\.0 lacks"):
        read_lock(tree.lock)


def test_a_plan_under_a_lock_parses_nothing(tree, monkeypatch):
    """The bodies of its files are in the lock, as those of releases are in known_files.json."""
    write(tree, verdict(tree, IS_FIXED))
    with nothing_parsed(monkeypatch):
        assert roll(tree).action == "apply"


def test_bodies_of_a_lock_end_with_it(tree):
    """A later plan in the same process does not take a fingerprint from a lock that it is not made under."""
    lock = write(tree, verdict(tree, IS_FIXED))
    content = json.loads(lock.read_text())
    known = load_matrix(tree.matrix).known_bodies("roll-fix", "old")["megatron.core.roll:roll"]
    for bodies in content["proved"]["files"]["megatron.core.roll"].values():
        bodies["roll"] = next(iter(known))
    lock.write_text(json.dumps(content))
    assert "all 3 functions match a known release" in roll(tree).reason
    assert shim.plan()["roll-fix"].action == "drifted"


def test_a_lock_without_proofs_has_no_evidence(tree):
    write_lock(tree.lock, tree.plan())
    content = read_lock(tree.lock)
    assert evidence_for(content, tree.plan().environment) == {} and files_of(content) == {}
    assert evidence_for(None, tree.plan().environment) == {} and files_of(None) == {}


def test_a_tree_that_lacks_a_body_is_another_tree(tree):
    """A read that is missing has the fingerprint "" on both sides."""
    without = EDITED.replace("def helper", "def other").replace("helper(x)", "other(x)")
    tree.install(without)
    said = verdict(tree, IS_FIXED)
    assert said["fingerprints"]["megatron.core.roll:helper"] == GONE
    write(tree, said)
    assert roll(tree).action == "apply"
    tree.install(EDITED)
    assert roll(tree).action == "drifted"


@pytest.mark.parametrize("text", [REWORKED, FIXED])
def test_evidence_of_another_release_is_none(tree, text):
    write(tree, verdict(tree, IS_FIXED))
    tree.install(text, "0.18.0")
    assert "proved" not in roll(tree).reason
