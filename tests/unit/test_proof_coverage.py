"""The record of the bodies that no proof runs, and the table made of it. What is measured there needs real releases."""

import json

import pytest
from unit_helpers import REPOSITORY

from shim._matrix.load import load_matrix
from shim.maintenance import proof_coverage

FILE = REPOSITORY / "docs" / proof_coverage.RECORD
MEASURED = json.loads(FILE.read_text("utf-8"))


def said(variant, *missed, targets=()):
    """What is recorded of a patch on one release."""
    found = {"variant": variant, "missed": list(missed)}
    return {**found, "targets": list(targets), "why": "no proof runs it"} if missed else found


def test_a_body_is_missed_only_if_no_release_of_its_variant_runs_it():
    found = {
        "1": {"a": said("v1", "m:f", "m:g", targets=["m:f"])},
        "2": {"a": said("v1", "m:g")},
        "3": {"a": said("v2", "m:f", targets=["m:f"])},
    }
    rows = proof_coverage.missed(found)
    assert rows == [("a", "v1", "read", "m:g", "no proof runs it"), ("a", "v2", "target", "m:f", "no proof runs it")]
    assert proof_coverage.missed({**found, "4": {"a": said("v2")}}) == rows[:1]


def test_the_table_has_a_line_for_each_body_with_its_variants():
    found = [("v1", "read", "m.n:f"), ("v1", "target", "m.n:g"), ("v2", "read", "m.n:f")]
    rows = [("a", *each, "why") for each in found]
    assert proof_coverage.table(rows).splitlines()[2:] == [
        "| a | v1 | `g` of `n` | target | why |",
        "| a | v1, v2 | `f` of `n` | read | why |",
    ]


@pytest.mark.parametrize("cell", MEASURED)
def test_what_is_recorded_are_bodies_of_the_matrix(cell):
    matrix = load_matrix()
    for id, found in MEASURED[cell].items():
        variant = matrix.patches[id].variants[found["variant"]]
        assert set(found["missed"]) <= set(variant.bodies), id
        assert found.get("targets", []) == [body for body in found["missed"] if body in variant.targets], id


def test_the_record_is_written_as_the_command_writes_it():
    assert FILE.read_text("utf-8") == proof_coverage.as_text(MEASURED)


def test_the_documents_list_what_no_proof_runs():
    text = (REPOSITORY / "docs" / "evidence.md").read_text("utf-8")
    assert proof_coverage.table(proof_coverage.missed(MEASURED)) in text
