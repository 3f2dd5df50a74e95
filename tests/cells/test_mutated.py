"""A dozen mutants of this release, run again: contracts break where a patch is wrong. All of them: make mutations."""

import io
import sys
from functools import cache

import judge
import measure
import pytest
import selected
import torch
from placing import place

from shim import testing
from shim._matrix.load import load_matrix
from shim._releases.sources import Sources

RELEASE = testing.release()
# Quick tests only: a whole model takes seconds for each mutant.
PATCHES = ("expert-bias-padding", "mla-rope-table", "frozen-recompute", "rope-thd", "mtp-packed-sequences")
OF_EACH = 3
MATRIX = load_matrix()


def sample():
    """(patch, body, name) of a few mutants of each patch; of those that are wrong with it first, which end early."""
    for id in PATCHES:
        measured = [
            (found["tests"], body, name)
            for body, mutants in measure.read().get(RELEASE, {}).get(id, {}).items()
            for name, found in mutants.items()
            if "tests" in found and (found["tests"] == "fail" or id != PATCHES[-1])
        ]
        yield from ((id, body, name) for _, body, name in sorted(measured)[:OF_EACH])


SAMPLE = list(sample()) if sys.version_info[:2] == (3, 11) else []
if not SAMPLE:
    pytest.skip("no mutant of this release was measured, or on another Python", allow_module_level=True)


@cache
def mutants_of(id):
    variant = MATRIX.patches[id].variants[MATRIX.pins["megatron-core"][RELEASE][id].variant]
    return judge.mutants_of(Sources(), id, variant)


@pytest.fixture(autouse=True)
def without_compilers(monkeypatch):
    """As mutants were measured."""
    monkeypatch.setattr(torch._dynamo.config, "disable", True, raising=False)


@pytest.mark.parametrize(("id", "body", "name"), SAMPLE, ids=[f"{id} {name}" for id, _, name in SAMPLE])
def test_a_mutant_is_what_it_was_measured_to_be(id, body, name):
    """In a fork of this process, with upstream's function replaced; and the contract says the same."""
    expected = measure.read()[RELEASE][id][body][name]
    sources, variant = Sources(), MATRIX.patches[id].variants[MATRIX.pins["megatron-core"][RELEASE][id].variant]
    mutant = next(m for where, m in mutants_of(id) if (where, m.name) == (body, name))

    def run():
        place(sources, body, mutant)
        return measure._tests(selected.tests_of(id), io.StringIO())

    found = measure._forked(run, measure.SECONDS)
    assert found.get("tests") == expected["tests"], found
    broken = judge.contract_on(judge.Reduced(sources, [body]), variant, body, mutant)
    assert broken or found["tests"] == "pass"


def test_the_tests_that_tell_pass_on_what_upstream_wrote():
    """Else they would fail on every mutant."""
    for id in PATCHES:
        found = measure._forked(lambda id=id: measure._tests(selected.tests_of(id), io.StringIO()), measure.SECONDS)
        assert found["tests"] == "pass" and found["passed"] > 0, (id, found)
