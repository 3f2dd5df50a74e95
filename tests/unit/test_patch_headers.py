"""The header of a patch says five things, in this order, each at the beginning of a line."""

import re

import pytest

from shim._matrix.load import load_matrix
from shim._planning.texts import patch_docstring

PATCHES = load_matrix().patches
WRONG = re.compile(r"^What is (?:wrong|missing|slow|large)\b", re.MULTILINE)
PATCH = re.compile(r"^(?:The patch|What the patch does)\b", re.MULTILINE)
UPSTREAM = re.compile(r"^Upstream: ", re.MULTILINE)
DELETE = re.compile(r"^Delete when: (.+?)\.\s*\Z", re.MULTILINE | re.DOTALL)
RELEASE = re.compile(r"\b\d+\.\d+")


def missing_of(header):
    """The parts that a header lacks, or has elsewhere."""
    order = {"what is wrong": WRONG, "what the patch does": PATCH, "upstream": UPSTREAM, "when to delete it": DELETE}
    found = {part: expression.search(header) for part, expression in order.items()}
    missing = [part for part, match in found.items() if match is None]
    if missing:
        return missing
    starts = [match.start() for match in found.values()]
    wrong, patch = starts[:2]
    odd = [] if RELEASE.search(header[wrong:patch]) else ["since which release"]
    return odd if starts == sorted(starts) else [*odd, "their order"]


@pytest.mark.parametrize("id", PATCHES)
def test_a_header_has_its_five_parts(id):
    """What is wrong, since which release, what the patch does, what upstream has done, when to delete the patch."""
    assert missing_of(patch_docstring(PATCHES[id])) == []


@pytest.mark.parametrize("id", PATCHES)
def test_a_header_says_when_to_delete_the_patch(id):
    """In one sentence, which stands last."""
    header = patch_docstring(PATCHES[id])
    assert header.count("Delete") == 1
    assert DELETE.search(header) and not PATCHES[id].delete_when  # which would say it a second time


WHOLE = """A roll.

What is wrong (0.12 to 0.20): it is wrong.

The patch rolls.

Upstream: open.

Delete when: 0.20 is not
supported.
"""


@pytest.mark.parametrize(
    "old, new, missing",
    [
        ("roll", "roll", []),
        ("What is wrong (0.12 to 0.20)", "Stock (0.12 to 0.20)", ["what is wrong"]),
        ("0.12 to 0.20", "all releases", ["since which release"]),
        ("The patch", "It", ["what the patch does"]),
        ("Upstream: open.", "See upstream.", ["upstream"]),
        ("Delete when: ", "Delete as soon as ", ["when to delete it"]),
        ("supported.\n", "supported.\n\nNot covered: a fork.\n", []),
        ("The patch rolls.\n\nUpstream: open.\n", "Upstream: open.\n\nThe patch rolls.\n", ["their order"]),
    ],
)
def test_a_header_without_a_part_is_seen(old, new, missing):
    """So the test above can fail."""
    assert missing_of(WHOLE.replace(old, new, 1)) == missing
