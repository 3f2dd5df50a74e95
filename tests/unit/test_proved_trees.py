"""What the proofs said of changed trees (maintenance/mutations/proved.json), against what is known of these trees."""

from pathlib import Path

import proving
import pytest

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence.md"
FIX_BY_HAND = next(iter(proving.FIXES_AMONG_MUTANTS))


@pytest.fixture(scope="module")
def counts():
    """For mutants and for fixes, how often each outcome came."""
    return proving.table(proving.read())


@pytest.mark.parametrize(
    "verdict, truth, fixed, text, said",
    [
        ("fixed", "right", False, "", "right yes"),
        ("fixed", "wrong", False, "", "WRONG YES"),
        ("fixed", "wrong", True, "", "WRONG YES"),
        ("right on stock", "right", True, "", "right on stock"),
        ("right on stock", "wrong", True, "", "right on stock"),
        ("right on stock", "right", False, FIX_BY_HAND, "right on stock"),
        ("right on stock", "right", False, "", "WRONG YES"),
        ("not fixed", "wrong", False, "", "right no"),
        ("not fixed", "right", False, "", "false alarm"),
        ("cannot run", "wrong", True, "", "false alarm"),
        ("known", "wrong", False, "", "known"),
    ],
)
def test_what_proofs_say_is_judged_by_what_is_known(verdict, truth, fixed, text, said):
    assert proving.verdict({"verdict": verdict, "truth": truth, "fixed": fixed, "text": text}) == said


def case(verdict, truth="right", fixed=False):
    return {"verdict": verdict, "truth": truth, "fixed": fixed, "text": ""}


def test_outcomes_are_counted():
    mutants = {
        "a": case("fixed"),
        "b": case("cannot run"),
        "c": case("not fixed", truth="wrong"),
        "d": case("fixed"),
        "e": case("fixed", truth="wrong"),
    }
    found = proving.table({"x": {**mutants, "f": case("right on stock", fixed=True)}, "y": {"a": case("fixed")}})
    expected = {"trees": 6, "patches": 2, "right yes": 3, "false alarm": 1, "right no": 1, "WRONG YES": 1}
    assert found["mutants"] == {**expected, "right on stock": 0}
    assert (found["fixes"]["trees"], found["fixes"]["patches"]) == (1, 1)


def test_no_patch_is_proved_on_a_tree_that_it_breaks_or_that_has_the_defect():
    found = [(id, key, proving.verdict(case)) for id, cases in proving.read().items() for key, case in cases.items()]
    assert [where for *where, said in found if said in ("WRONG YES", "known")] == []


def test_enough_trees_were_asked_about_for_a_rate(counts):
    assert sum(count["trees"] for count in counts.values()) >= 60
    assert all(count["trees"] - count["right no"] >= 20 for count in counts.values())


@pytest.mark.parametrize("kind", ["mutants", "fixes"])
def test_the_proofs_leave_one_needless_refusal_in_ten_at_most(counts, kind):
    assert counts[kind]["false alarm"] <= 0.1 * (counts[kind]["trees"] - counts[kind]["right no"])


@pytest.mark.parametrize("kind", ["mutants", "fixes"])
def test_the_document_gives_these_counts(counts, kind):
    assert (
        f"| {kind} | " + " | ".join(str(counts[kind][name]) for name in proving.COUNTED) + " |" in EVIDENCE.read_text()
    )
