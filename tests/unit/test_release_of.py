"""`make release-of`: what it prints, and which ranges it writes on its own."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from unit_helpers import megatron

from shim._errors import OptionError
from shim._planning.evidence import CANNOT_RUN, FIXED, LACKING, NOT_FIXED, RIGHT, VERDICTS
from shim._tools.pin_prove import VERDICTS as TITLES
from shim.maintenance import release_of
from shim.maintenance.pin_add import New, parse_new
from shim.maintenance.release_of import TODO, summary

NEW = New("megatron-core", "0.20.0", False)


def said(verdict, variant=None):
    return {"verdict": verdict, "variant": variant, "shown": "gradient off by 7.6e-02 -> 1.7e-07"}


def printed(decide, patches, ranges=(), against=()):
    found = SimpleNamespace(
        new=NEW, name="0.20.0", widened={"wider": ("0.20", "0.21")}, ranges=dict(ranges), decide=decide
    )
    return summary(found, {"patches": patches}, against, Path("report.txt"), 150.0)


def test_each_decision_has_a_line():
    """What the proofs say comes before what the ranges say, which is long."""
    text = printed(
        ["a-fix: the ranges say v0_19, its bodies say upstream; correct the ranges", "other: is not pinned"],
        {"a-fix": said(NOT_FIXED, "v0_19"), "known": said(FIXED, "v0_19")},
        {"written": "upstream"},
        ["  third: by its bodies this tree needs it, and its proofs are right on stock (bit-equal)"],
    )
    assert text.splitlines() == [
        "megatron-core 0.20.0 is in the matrix, after 2.5 minutes",
        "2 patches have bodies that no release has: 1 not fixed, 1 fixed",
        "Ranges written: 1 wider ones, new ones of written (upstream)",
        "To decide, 3; report.txt has the diffs:",
        "  third: by its bodies this tree needs it, and its proofs are right on stock (bit-equal)",
        "  a-fix: write a variant (not fixed by v0_19: gradient off by 7.6e-02 -> 1.7e-07)",
        "  other: is not pinned",
        "Then make docs-all, the tests, and a fragment: docs/new-release.md",
    ]


def test_nothing_to_decide_is_said():
    assert "To decide, 0; report.txt has the diffs:\n  nothing\n" in printed([], {})


def test_there_are_at_most_thirty_lines():
    text = printed([f"patch-{number} {'x' * 200}" for number in range(90)], {})
    assert len(text.splitlines()) <= 30 and max(map(len, text.splitlines())) <= 120
    assert "  and 70 more" in text


def test_every_verdict_says_what_to_do():
    assert set(TODO) == set(VERDICTS) == set(TITLES) == {FIXED, RIGHT, LACKING, NOT_FIXED, CANNOT_RUN}


def test_another_release_is_refused_before_its_proofs(tmp_path, monkeypatch):
    monkeypatch.setattr(release_of, "_prove", lambda *given: pytest.fail("proofs ran"))
    with pytest.raises(OptionError, match=r"says that it is megatron-core 0\.19\.0, and not 0\.20\.0"):
        release_of.main(["0.20.0", str(megatron(tmp_path, "0.19.0", {"roll.py": "x = 1\n"}))])


def test_a_commit_is_no_release(monkeypatch):
    with pytest.raises(OptionError, match="a commit is added by `shim pin --add`"):
        release_of.main(["0123456789"])
    assert parse_new("transformer-engine==2.21.0").distribution == "transformer-engine"
