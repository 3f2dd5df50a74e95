"""Evidence that ships with shim: what proofs have shown on commits and forks counts for those bodies alone."""

import json
import zlib
from dataclasses import replace

import pytest
from edited_trees import BODIES, EDITED_AGAIN, proved, verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_helpers import FIXED

from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._planning.evidence import CANNOT_RUN, LACKING, NOT_FIXED, RIGHT, VERDICTS
from shim._planning.evidence import FIXED as IS_FIXED
from shim._planning.plan import make_plan
from shim._proving.decide import _unknown_bodies
from shim._releases.known_files import (
    TREES,
    _files_of_trees,
    known_trees,
    known_value,
    unpacked,
)
from shim.maintenance.known_trees import is_stale, main, render_trees, with_tree, without_failures
from shim.maintenance.tables import packed, render_packed

EMPTY = {"trees": {}, "patches": {}, "files": {}}
MATRIX = load_matrix()


def lock_of(world, said):
    return {"releases": {"megatron-core": "0.17.0"}, "proved": proved(world, said)}


def added(table, name, world, said, **about):
    """The table with what was shown on the installed tree."""
    return with_tree(table, name, {"of": "a fork", **about}, lock_of(world, said), world.plan().matrix.patches)


@pytest.fixture(autouse=True)
def no_files_stay_known():
    """The files of a table that a test has shipped are read once in a process."""
    yield
    _files_of_trees.cache_clear()


@pytest.fixture
def shipped(tree, monkeypatch):
    """The world with its matrix in the place of the shipped one; `ship(table)` is the evidence beside it."""
    monkeypatch.setattr("shim._matrix.model.Matrix.shipped", True)

    def ship(table):
        monkeypatch.setattr("shim._planning.evidence.known_trees", lambda: table)

    ship(EMPTY)
    tree.ship = ship
    return tree


def decided(world):
    return world.plan()["roll-fix"]


@pytest.mark.parametrize(
    ("said", "variant", "action", "reason"),
    [
        (IS_FIXED, "old", "apply", "proved on the same bodies in a-fork (2026-01-02, 1e-1 -> 0)"),
        (RIGHT, None, "upstream", "is right without it: proved on the same bodies in a-fork (2026-01-02, 1e-1 -> 0)"),
        (
            LACKING,
            None,
            "not-needed",
            "lacks what this patch fixes: seen on the same bodies in a-fork",
        ),
        (NOT_FIXED, "old", "drifted", "its proofs fail on the same bodies in a-fork (2026-01-02, 1e-1 -> 0)"),
    ],
)
def test_what_was_shown_on_a_known_tree_decides(shipped, said, variant, action, reason):
    assert decided(shipped).action == "drifted" and "proofs" not in decided(shipped).reason
    shipped.ship(added(EMPTY, "a-fork", shipped, verdict(shipped, said, variant)))
    found = decided(shipped)
    assert found.action == action and reason in found.reason
    shipped.install(EDITED_AGAIN)
    assert decided(shipped).action == "drifted" and "proofs" not in decided(shipped).reason


def test_what_was_shown_of_more_bodies_comes_first(shipped):
    """Two trees have the same bodies of one variant, and one of them has fixed the defect in a body of another."""
    table = EMPTY
    for number, said in enumerate((NOT_FIXED, IS_FIXED, RIGHT)):
        before = decided(shipped).reason
        table = added(table, f"tree-{number}", shipped, verdict(shipped, said, None if said == RIGHT else "old"))
        shipped.ship(table)
        assert f"tree-{number}" in decided(shipped).reason != before


def test_a_commit_of_the_history_is_named_with_its_day(shipped):
    shipped.ship(added(EMPTY, "0123456789", shipped, verdict(shipped, IS_FIXED), of="#12", day="2026-05-19"))
    reason = "proved on the same bodies in commit 0123456789 of 2026-05-19 (2026-01-02, 1e-1 -> 0)"
    assert reason in decided(shipped).reason


def test_another_matrix_has_no_part_in_it(tree, monkeypatch):
    """Its patches may bear the same names."""
    table = added(EMPTY, "a-fork", tree, verdict(tree, IS_FIXED))
    monkeypatch.setattr("shim._planning.evidence.known_trees", lambda: table)
    assert decided(tree).action == "drifted"


def test_bodies_of_a_right_release_need_no_evidence(shipped, monkeypatch):
    """So that a plan on a release does not read the table."""
    shipped.install(FIXED, "0.18.0")
    monkeypatch.setattr("shim._planning.evidence.known_trees", lambda: pytest.fail("the table was read"))
    assert decided(shipped).action == "upstream"


def test_proofs_that_could_not_run_here_yield_to_those_of_a_known_tree(shipped):
    """A lock is made where a module of the image may be missing."""
    shipped.ship(added(EMPTY, "a-fork", shipped, verdict(shipped, IS_FIXED)))
    plan = shipped.plan()
    otherwise = {"state": "drifted", "reason": "changed", "cause": "changed", "dropped": ""}
    for said, reason in ((CANNOT_RUN, "in a-fork"), (NOT_FIXED, "on this tree")):
        lock = lock_of(shipped, verdict(shipped, said, otherwise=otherwise))
        options = replace(plan.options, lock_content={**lock, "releases": {}})
        made = make_plan(plan.environment, plan.matrix, options, plan.losses)
        assert reason in made["roll-fix"].reason


def test_trees_with_the_same_bodies_stand_together(shipped):
    one = added(EMPTY, "one", shipped, verdict(shipped, IS_FIXED))
    both = added(one, "two", shipped, verdict(shipped, IS_FIXED, shown="2e-1 -> 0"))
    [said] = both["patches"]["roll-fix"]
    assert list(said["bodies"].values()) == ["one two"] and said["shown"] == "1e-1 -> 0"
    assert set(both["trees"]) == {"one", "two"}
    shipped.install(EDITED_AGAIN)
    apart = added(both, "two", shipped, verdict(shipped, IS_FIXED))
    [said] = apart["patches"]["roll-fix"]
    assert list(said["bodies"].values()) == ["one", "two"]
    text = render_trees(apart)
    assert json.loads(text) == apart and render_trees(json.loads(text)) == text


def test_what_did_not_fix_a_commit_is_forgotten_to_be_tried_again(shipped):
    one = added(EMPTY, "one", shipped, verdict(shipped, NOT_FIXED))["patches"]
    assert without_failures(one, ["another"]) == one
    assert without_failures(one, ["one"]) == {}
    fixed = added(EMPTY, "one", shipped, verdict(shipped, IS_FIXED))["patches"]
    assert without_failures(fixed, ["one"]) == fixed


def test_what_showed_nothing_is_not_in_the_table(shipped):
    """And takes away what the tree had shown before."""
    one = added(EMPTY, "one", shipped, verdict(shipped, IS_FIXED))
    assert added(one, "one", shipped, verdict(shipped, CANNOT_RUN))["patches"] == {}
    with pytest.raises(OptionError, match="has no proofs"):
        with_tree(EMPTY, "one", {}, {"releases": {}}, {})


def test_files_of_a_known_tree_are_not_parsed(shipped, monkeypatch):
    table = added(EMPTY, "one", shipped, verdict(shipped, IS_FIXED))
    monkeypatch.setattr("shim._releases.known_files.known_trees", lambda: table)
    _files_of_trees.cache_clear()
    digest = shipped.plan().environment.sources.digest("megatron.core.roll")
    body = decided(shipped).fingerprints["megatron.core.roll:roll"]
    assert known_value(digest, "megatron.core.roll", "roll", False) == body
    assert known_value("another", "megatron.core.roll", "roll", False) is None
    assert known_value(digest, "megatron.core.roll", "another", False) is None
    _files_of_trees.cache_clear()


NAMED = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["0123456789abcdef.01234567", "absent", ""]))
DIGESTS = st.dictionaries(st.text("0123456789abcdef", min_size=16, max_size=16), NAMED.filter(bool), min_size=1)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["m.x", "m.y"]), DIGESTS))
def test_a_packed_table_gives_the_files_back(table):
    assert {module: unpacked(packed(table), module) for module in table} == table
    assert unpacked(packed(table), "another") == {} and json.loads(render_packed(packed(table))) == packed(table)


def test_a_fork_needs_words(tmp_path, shipped, monkeypatch):
    monkeypatch.setattr("shim.maintenance.known_trees.TREES", tmp_path / "known_trees.json")
    (tmp_path / "known_trees.json").write_text(render_trees(EMPTY))
    with pytest.raises(OptionError, match="say with --note what it is"):
        main(["a-fork", str(tmp_path / "no.lock")])


def test_what_a_patch_relies_on_has_not_changed_if_it_is_in_a_release(shipped):
    """No proof has to run it, whatever variant the release gets. What the patch binds has to run."""
    plan = shipped.plan()
    roll, helper = "megatron.core.roll:roll", "megatron.core.roll:helper"
    assert set(_unknown_bodies(plan, "roll-fix", "old")) == {roll}
    pinned = {**plan.matrix.pinned["roll-fix"], "old": {}}
    matrix = replace(plan.matrix, pinned={**plan.matrix.pinned, "roll-fix": pinned})
    assert helper in matrix.pinned["roll-fix"]["new"]
    assert set(_unknown_bodies(replace(plan, matrix=matrix), "roll-fix", "old")) == set(BODIES) - {helper}


# The shipped table

TABLE = known_trees()


def test_the_table_is_as_it_is_written():
    assert render_trees(TABLE) == TREES.read_text("utf-8")


@pytest.mark.parametrize("id", TABLE["patches"])
def test_what_was_shown_is_of_today_s_variants(id):
    """Of other targets it would speak for bodies that nobody has measured."""
    for said in TABLE["patches"][id]:
        assert said["verdict"] in VERDICTS and set(" ".join(said["bodies"].values()).split()) <= set(TABLE["trees"])
        assert not is_stale(MATRIX.patches[id], said), f"{id}: run make history, and prove the known trees again"


def test_evidence_about_other_names_is_stale():
    entry, said = MATRIX.patches["mtp-recompute"], TABLE["patches"]["mtp-recompute"][0]
    assert not is_stale(entry, said)
    assert is_stale(None, said) and is_stale(entry, {**said, "variant": "gone"})
    variants = {name: replace(variant, targets=variant.targets[1:]) for name, variant in entry.variants.items()}
    assert is_stale(replace(entry, variants=variants), said)


def test_the_table_is_small():
    """In the wheel, which is a zip; and so that a plan on an unknown tree, which reads it, takes a few milliseconds."""
    assert len(zlib.compress(TREES.read_bytes())) <= 150_000
    assert TREES.stat().st_size <= 450_000


def test_each_commit_is_in_the_table():
    assert set(MATRIX.commits["megatron-core"]) <= set(TABLE["trees"])
