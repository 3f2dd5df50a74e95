"""What was measured on mutants and on neighbouring releases (tests/mutations), against the contracts of today."""

import sys
from collections import Counter
from pathlib import Path

import judge
import measure
import neighbours
import pytest
from thorough import THOROUGH

from shim._matrix.load import load_matrix

# Mutants are named by the text of their code.
pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="ast.unparse writes other text elsewhere")
DOCS = Path(__file__).parents[2] / "docs/contracts.md"


@pytest.fixture(scope="module")
def mutants():
    """(cell, patch, body, name, verdict, what breaks the contract) of every mutant that was measured."""
    if not THOROUGH:
        pytest.skip("to make the mutants takes half a minute: under `make matrix`")
    return [(*where, judge.verdict(broken, found), broken) for *where, broken, found in judge.judged(measure.read())]


@pytest.fixture(scope="module")
def beside():
    matrix = load_matrix()
    return [
        (*where, neighbours.verdict(broken, found), broken)
        for *where, broken, found in neighbours.judged(matrix, neighbours.read())
    ]


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


def row(counts):
    names = ("right yes", "right no", "WRONG YES", "false alarm", "dead", "not placed")
    return f"{sum(counts.values())} | " + " | ".join(str(counts[name]) for name in names)


def test_the_documents_give_these_counts(mutants, beside):
    text = DOCS.read_text()
    assert f"| mutants | {row(Counter(said for *_, said, _ in mutants))} |" in text
    assert f"| neighbours | {row(Counter(said for *_, said, _ in beside))} |" in text
