"""What was measured on mutants and on fixes of releases (maintenance/mutations), against what they are today."""

import sys
from collections import Counter

import fixing
import measure
import proving
import pytest
from thorough import THOROUGH

from shim.testing.releases import at_hand

# Mutants are named by the text of their code.
pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="ast.unparse writes other text elsewhere")
COMMITS_AT_HAND = at_hand("d98e8a64dd", "megatron-core")  # mtp-without-te is for no release yet


@pytest.fixture(scope="module")
def thorough():
    if not THOROUGH:
        pytest.skip("to make all mutants takes a minute: under `make matrix`")


@pytest.fixture(scope="module")
def fixed(thorough):
    """(patch, what is done, what was measured) of every fix."""
    return list(fixing.measured())


def test_every_patch_was_asked_about_three_fixes_at_least(fixed):
    """Each is right on stock: what is none would say nothing."""
    assert [where for *where, found in fixed if found["stock"] != "right"] == []
    counts = Counter(id for id, *_ in fixed)
    few = {id: counts[id] for id in fixing.with_fixes() if counts[id] < 3}
    assert few == ({} if COMMITS_AT_HAND else {"mtp-without-te": 0})


def test_every_fix_was_measured_as_it_is(fixed):
    """A fix whose text has changed was measured in vain: run fixing.py --add."""
    written = [(id, fix.what) for id in fixing.with_fixes() for fix in fixing.fixes_of(id)]
    assert sorted(written) == sorted((id, what) for id, what, _ in fixed)


def test_everything_that_was_measured_is_there(thorough):
    """A mutant that is made no longer was measured in vain: run measure.py, or take it out of the table."""
    table = measure.read()
    entries = [name for patches in table.values() for bodies in patches.values() for b in bodies.values() for name in b]
    assert sum(1 for _ in measure.measured_mutants()) == len(entries) >= 200


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
