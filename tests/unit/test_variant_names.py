"""A variant has the name of the first release that gets it."""

import re

import pytest
from packaging.version import Version

from shim._matrix.load import load_matrix

MATRIX = load_matrix(check_ranges=True)
LOWEST = re.compile(r"^>=(\d+(?:\.\d+)*)")


def first_ends(entry):
    """Variant -> the lower end of the first of its ranges, over the distribution of the patch."""
    found = {}
    for rule in entry.rules:
        if rule.variant is not None:
            end = LOWEST.match(str(rule.ranges[entry.distribution]))[1]
            found.setdefault(rule.variant, end)
    return found


def name_of(end):
    return "v" + end.replace(".", "_")


@pytest.mark.parametrize("id", MATRIX.patches)
def test_a_variant_is_named_after_the_lower_end_of_its_first_range(id):
    """A word may stand behind, where two variants begin at one release."""
    assert [
        f"{variant} begins at {end}"
        for variant, end in first_ends(MATRIX.patches[id]).items()
        if variant != name_of(end) and not re.fullmatch(rf"{name_of(end)}_[a-z]\w*", variant)
    ] == []


@pytest.mark.parametrize("id", MATRIX.patches)
def test_a_variant_that_no_range_gives_is_named_after_its_first_commit(id):
    """After the release that the sources come before, with a word behind, because that release has another variant."""
    entry = MATRIX.patches[id]
    for variant in entry.variants.keys() - first_ends(entry).keys():
        commits = MATRIX.commits[entry.distribution].values()
        first = next(Version(commit.version) for commit in commits if MATRIX.wanted(id, commit.name) == variant)
        assert re.fullmatch(rf"v{first.major}_{first.minor}_[a-z]\w*", variant), variant
