"""changes/ holds a fragment for each change that users notice. `make changelog` needs towncrier, these tests do not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from unit_helpers import REPOSITORY

from shim._matrix.load import load_matrix
from shim.maintenance.changes import KINDS, PAGES, fragments, unannounced, wrong_fragments

IDS = ("roll-fix", "roll")


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "changes").mkdir()
    for page in PAGES:
        (tmp_path / "changes" / page).touch()
    (tmp_path / "CHANGELOG.md").write_text("- Patch `roll-fix`: rolls.\n")
    return tmp_path


def test_the_fragments_of_this_checkout_have_right_names_and_text():
    """And each patch is in one of them or in CHANGELOG.md."""
    ids = load_matrix().patches
    assert wrong_fragments(REPOSITORY, ids) == []
    assert [line for id in ids for line in unannounced(REPOSITORY, id)] == []


@pytest.mark.parametrize("name", ["roll-fix.added.md", "roll.fixed.md", "+lock-of-2.changed.md", "+x.removed.md"])
def test_a_fragment_is_named_after_its_patch_or_with_words(tree, name):
    (tree / "changes" / name).write_text("Packed rows roll right.\n")
    assert [file.name for file in fragments(tree)] == [name] and wrong_fragments(tree, IDS) == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("roll-fix.bugfix.md", "x", "no name of a fragment; PATCH.KIND.md or +WORDS.KIND.md"),
        ("roll-fix.added.1.md", "x", "no name of a fragment"),
        ("roll-fix.md", "x", "no name of a fragment"),
        ("Roll.fixed.md", "x", "no name of a fragment"),
        ("roll-fux.added.md", "x", r"there is no patch roll-fux; +roll-fux.added.md if it is about no patch"),
        ("roll.added.md", " \n", "empty"),
        ("roll.added.md", "- Patch", "begins with -; `make changelog` adds headings and bullets"),
        ("roll.added.md", "### Added", "begins with ###"),
    ],
)
def test_a_fragment_that_towncrier_would_lose_or_garble_is_named(tree, name, text, says):
    (tree / "changes" / name).write_text(text)
    (line,) = wrong_fragments(tree, IDS)
    assert line.startswith(f"changes/{name}: ") and says in line


def test_a_folder_among_the_fragments_is_named(tree):
    (tree / "changes" / "roll.added.md").mkdir()
    assert wrong_fragments(tree, IDS) == ["changes/roll.added.md: empty; write one or two sentences"]


def test_a_patch_is_announced_by_its_whole_id(tree):
    """In the changelog or in a fragment. `roll` is not announced by news of `roll-fix`."""
    assert unannounced(tree, "roll-fix") == []
    (tree / "changes" / "roll-fix.fixed.md").write_text("x")
    assert unannounced(tree, "roll") == [
        "changes/roll.added.md: missing; say in one or two sentences what the patch fixes"
    ]
    (tree / "changes" / "roll.added.md").write_text("x")
    assert unannounced(tree, "roll") == []


def test_towncrier_is_told_the_same_kinds_and_pages():
    """Else a fragment that these tests take would stop `make changelog`."""
    config = (REPOSITORY / "pyproject.toml").read_text("utf-8").partition("[tool.towncrier]")[2]
    assert tuple(re.findall(r'directory = "(\w+)", name', config)) == KINDS
    assert tuple(re.findall(r'"([^"]+)"', re.search(r"^ignore = (.*)$", config, re.MULTILINE)[1])) == PAGES
    start = re.search(r'^start_string = "(.*)\\n"$', config, re.MULTILINE)[1]
    assert (REPOSITORY / "CHANGELOG.md").read_text("utf-8").count(f"{start}\n\n## ") == 1


def test_towncrier_makes_a_section_with_a_list_of_each_kind(tree):
    """As `make changelog` calls it: above the last release, in the order of the kinds, by name within one."""
    command = Path(sys.executable).with_name("towncrier")
    if not command.exists():
        pytest.skip("towncrier is not installed for this Python")
    for name in ("pyproject.toml", "CHANGELOG.md", "changes/template.md"):
        (tree / name).write_bytes((REPOSITORY / name).read_bytes())
    (tree / "changes" / "roll.fixed.md").write_text("Rolls of two\nlines.\n")
    (tree / "changes" / "+lock.added.md").write_text("A lock.\n")
    (tree / "changes" / "roll-fix.added.md").write_text("Patch `roll-fix`.\n")
    before, mark, after = (tree / "CHANGELOG.md").read_text("utf-8").partition("follow, the newest first. -->\n\n")
    run = [command, "build", "--yes", "--version", "7.0.0", "--date", "2030-01-02"]
    done = subprocess.run(run, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    section = "## [7.0.0] - 2030-01-02\n\n### Added\n\n- Patch `roll-fix`.\n- A lock.\n\n"
    section += "### Fixed\n\n- Rolls of two\n  lines.\n\n"
    assert (tree / "CHANGELOG.md").read_text("utf-8") == before + mark + section + after
    assert fragments(tree) == []
