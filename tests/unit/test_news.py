"""Lines of the changelog by patch and version."""

import pytest
from unit_helpers import write_file

from shim._tools.news import UNRELEASED, news_of

CHANGELOG = """
    # Changelog

    ## [Unreleased]

    ### Added

    - Patch `roll-fix`: rolls stay
      inside their sequence.
    - Something else, which goes on for so long that what it names at its end is only mentioned there, and
      nothing more than that: roll-fix.

    ## [0.2.0] - 2026-01-01

    - roll-fix on the main branch.
    - `roll-fixer` is another.

    ## [0.1.0] - 2025-01-01

    - `roll-fix`, the first.
    """


@pytest.fixture
def top(tmp_path):
    write_file(tmp_path / "CHANGELOG.md", CHANGELOG)
    write_file(tmp_path / "changes/roll-fix.fixed.md", "A crash\nis gone.\n")
    write_file(tmp_path / "changes/roll-fixer.fixed.md", "No.\n")
    return tmp_path


def test_lines_about_a_patch_come_with_their_version(top):
    """Fragments first, then the sections as they stand."""
    assert news_of("roll-fix", top=top) == [
        (UNRELEASED, "A crash is gone."),
        (UNRELEASED, "Patch `roll-fix`: rolls stay inside their sequence."),
        ("0.2.0", "roll-fix on the main branch."),
        ("0.1.0", "`roll-fix`, the first."),
    ]
    assert [line.version for line in news_of("roll-fix", "0.1.0", top)] == [UNRELEASED, UNRELEASED, "0.2.0"]
    assert len(news_of("roll-fix", "no version", top)) == 4


def test_shims_own_changelog_is_found():
    """In this checkout; in a wheel it lies in the package (test_wheel.py)."""
    assert any("`shim audit`" in line.text for line in news_of("audit"))
    assert news_of("no-such-patch") == []


def test_a_line_that_counts_patches_up_is_about_none(tmp_path):
    write_file(tmp_path / "CHANGELOG.md", "## [0.1.0] - 2026-01-01\n\n- Errors (3): roll-fix, roll-back, roll-on.\n")
    assert news_of("roll-fix", top=tmp_path) == []


def test_without_a_changelog_there_is_no_news(tmp_path):
    assert news_of("roll-fix", top=tmp_path) == []
