"""What was measured on mutants, on fixes and on neighbouring releases, against today's contracts."""

import sys
from collections import Counter
from pathlib import Path

import fixing
import judge
import measure
import neighbours
import proving
import pytest
from thorough import THOROUGH

from shim._matrix.load import load_matrix
from shim.testing.releases import at_hand

# Mutants are named by the text of their code.
pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="ast.unparse writes other text elsewhere")
COMMITS_AT_HAND = at_hand("d98e8a64dd", "megatron-core")  # mtp-without-te is for no release yet
DOCS = Path(__file__).parents[2] / "docs/contracts.md"


@pytest.fixture(scope="module")
def thorough():
    if not THOROUGH:
        pytest.skip("to judge what was measured takes a minute: under `make matrix`")


@pytest.fixture(scope="module")
def mutants(thorough):
    """(cell, patch, body, name, verdict, what breaks the contract) of every mutant that was measured."""
    return [(*where, judge.verdict(broken, found), broken) for *where, broken, found in judge.judged(measure.read())]


@pytest.fixture(scope="module")
def beside(thorough):
    matrix = load_matrix()
    return [
        (*where, neighbours.verdict(broken, found), broken)
        for *where, broken, found in neighbours.judged(matrix, neighbours.read())
    ]


@pytest.fixture(scope="module")
def fixed(thorough):
    """(patch, what is done, verdict, why the patch is not applied) of every fix that was measured."""
    matrix = load_matrix()
    return [
        (*where, fixing.verdict(broken, found), broken)
        for *where, broken, found in fixing.judged(matrix, fixing.read())
    ]


def test_no_contract_is_kept_where_upstream_has_fixed_the_defect_and_the_patch_would_break_it(fixed):
    assert [where for *where, said, _ in fixed if said == "WRONG YES"] == []


def test_every_patch_with_a_contract_was_asked_about_three_fixes_at_least(fixed):
    """Each is right on stock: what is none would say nothing."""
    assert [where for *where, said, _ in fixed if said == "dead"] == []
    counts = Counter(id for id, *_ in fixed)
    few = {id: counts[id] for id in fixing.with_contracts(load_matrix()) if counts[id] < 3}
    assert few == ({} if COMMITS_AT_HAND else {"mtp-without-te": 0})


def test_every_fix_was_measured_as_it_is(fixed):
    """A fix whose text has changed was measured in vain: run fixing.py --add."""
    written = [(id, fix.what) for id in fixing.with_contracts(load_matrix()) for fix in fixing.fixes_of(id)]
    assert sorted(written) == sorted((id, what) for id, what, *_ in fixed)


def test_no_mutant_that_trains_wrong_keeps_its_contract(mutants):
    assert [where for *where, said, _ in mutants if said == "WRONG YES"] == []


def test_no_variant_is_taken_on_a_neighbour_where_it_is_wrong(beside):
    assert [where for *where, said, _ in beside if said == "WRONG YES"] == []


def test_everything_that_was_measured_is_there(mutants):
    """A mutant that is made no longer was measured in vain: run measure.py, or take it out of the table."""
    table = measure.read()
    entries = [name for patches in table.values() for bodies in patches.values() for b in bodies.values() for name in b]
    assert len(mutants) == len(entries) >= 200


def test_every_neighbour_was_measured(beside):
    matrix = load_matrix()
    expected = {(id, name, neighbours.cell_of(id, release)) for id, name, release in neighbours.neighbours(matrix)}
    assert {(id, name, cell) for id, name, cell, _, _ in beside} == expected


def test_what_was_proved_is_what_was_measured():
    """A truth that has changed was proved in vain: run proving.py again."""
    told = {}
    for patches in measure.read().values():
        for id, bodies in patches.items():
            for found in (found for mutants in bodies.values() for found in mutants.values()):
                if found["stock"] == "works":
                    told[id, found["text"], False] = proving.truth_of(id, found)
    for id, fixes in fixing.read().items():
        for found in fixes.values():
            told[id, found["text"], True] = "right" if found["patched"] == "right" else "wrong"
    for id, cases in proving.read().items():
        for key, case in cases.items():
            assert told[id, case["text"], case["fixed"]] == case["truth"], (id, key)


def row(counts):
    names = ("right yes", "right no", "WRONG YES", "false alarm", "dead", "not placed")
    return f"{sum(counts.values())} | " + " | ".join(str(counts[name]) for name in names)


def test_the_documents_give_these_counts(mutants, fixed, beside):
    text = DOCS.read_text()
    assert f"| mutants | {row(Counter(said for *_, said, _ in mutants))} |" in text
    if COMMITS_AT_HAND:
        assert f"| fixes | {row(Counter(said for *_, said, _ in fixed))} |" in text
    assert f"| neighbours | {row(Counter(said for *_, said, _ in beside))} |" in text
