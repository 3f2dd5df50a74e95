"""The right spelling of a wrong name: nearest first, three at most, and all names where none is near."""

import pytest

from shim._printing.printable import did_you_mean, nearest

KNOWN = ["mtp-recompute", "mtp-packed-sequences", "rope-fusion", "te-fp8-state", "paged-stash"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("MTP_Recompute", ["mtp-recompute"]),
        (" rope-fusion ", ["rope-fusion"]),
        ("recompute", ["mtp-recompute"]),
        ("rope-fusoin", ["rope-fusion"]),
        ("stash", ["paged-stash"]),
        ("te", []),
        ("", []),
        ("zzzzzz", []),
    ],
)
def test_case_and_hyphens_parts_and_typos(name, found):
    assert nearest(name, KNOWN) == found


def test_at_most_three_are_named():
    assert len(nearest("patch", [f"patch-{number}" for number in range(9)])) == 3


def test_where_none_is_near_all_are_named():
    assert did_you_mean("zzzzzz", KNOWN) == "known are " + ", ".join(KNOWN)
    assert did_you_mean("zzzzzz", []) == ""
    assert "rope-fusion" in did_you_mean("rope", KNOWN) and "paged-stash" not in did_you_mean("rope", KNOWN)
