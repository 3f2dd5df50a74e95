"""Changes of a matrix as text: what was asked for is there, and every other character stays."""

import difflib

import pytest
import yaml
from packaging.version import Version
from thorough import times
from unit_helpers import MATRIX

from shim._errors import MatrixError
from shim._matrix.declared import Commit
from shim._matrix.load import load_matrix, matrix_path
from shim.maintenance.matrix_text import top_bound, with_commit, with_new_range, with_release, with_wider_ranges

COMMENTED = """\
# First of all.
supported:
  megatron-core: ["0.16.0", "0.17.0"]  # two
  transformer-engine:  # é, and 𝄞 which is two units elsewhere
    - "2.1.0"

    # the last
    - "2.2.0"

# About patches.
patches:
  a-fix:
    variants:
      one: {applies: {megatron-core: ">=0.16,<0.17"}}  # until 0.17
      two:
        applies:
          - {megatron-core: ">=0.17, <0.18", transformer-engine: "<0.18"}
          - {megatron-core: ">=0.18,<0.19"}
    upstream:
      - {megatron-core: ">=0.15,<0.16", note: "<0.19"}
"""
COMMIT = Commit("a" * 10, "a" * 40, "0.20.0.dev0", "2026-08-22", "main, pinned by a trainer")


def changes(before, after):
    """The lines that went and came."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [line for line in lines if line[0] in "+-"]


@pytest.mark.parametrize(
    ("distribution", "release", "added"),
    [
        ("megatron-core", "0.18.0", '["0.16.0", "0.17.0", "0.18.0"]  # two'),
        ("megatron-core", "0.16.1", '["0.16.0", "0.16.1", "0.17.0"]  # two'),
        ("megatron-core", "0.9.0", '["0.9.0", "0.16.0", "0.17.0"]  # two'),
        ("transformer-engine", "2.1.1", '    - "2.1.0"\n    - "2.1.1"\n\n    # the last\n    - "2.2.0"\n'),
        ("transformer-engine", "2.10.0", '    - "2.2.0"\n    - "2.10.0"\n\n# About patches.'),
        ("transformer-engine", "1.0", '    - "1.0"\n    - "2.1.0"\n'),
    ],
)
def test_a_release_stands_at_its_place(distribution, release, added):
    found = with_release(COMMENTED, distribution, release)
    assert added in found
    assert [line for line in changes(COMMENTED, found) if line[0] == "-" and "0.16.0" not in line] == []
    assert release in yaml.safe_load(found)["supported"][distribution]


def test_a_list_with_comments_in_it_is_not_written_anew():
    text = COMMENTED.replace('"0.16.0", ', '"0.16.0",  # old\n    ')
    found = with_release(text, "megatron-core", "0.16.1")
    assert '["0.16.0", "0.16.1",  # old\n    "0.17.0"]' in found
    assert with_release(text, "megatron-core", "0.1").count('["0.1", "0.16.0",  # old') == 1


def test_a_list_that_is_not_there_is_not_begun():
    with pytest.raises(MatrixError, match="write the first by hand"):
        with_release("supported: {}\npatches: {}\n", "megatron-core", "0.1")


def test_long_lists_are_wrapped_as_they_were():
    """In the shipped matrix nothing but the end of the list changes."""
    text = matrix_path().read_text("utf-8")
    for distribution, release in (("megatron-core", "0.99.0"), ("transformer-engine", "2.99.0")):
        found = with_release(text, distribution, release)
        assert len(changes(text, found)) <= 3 and max(map(len, found.splitlines())) <= max(map(len, text.splitlines()))
        assert yaml.safe_load(found)["supported"][distribution][-1] == release


def test_the_first_commit_begins_the_list():
    found = with_commit(COMMENTED, "megatron-core", COMMIT)
    assert '    - "2.2.0"\n\ncommits:\n  megatron-core:\n    "aaaaaaaaaa":\n      commit: ' in found
    assert "pinned by a trainer\n\n# About patches." in found and "variants:\n        " not in found.partition("# A")[0]
    again = with_commit(found, "transformer-engine", COMMIT)
    assert again.index('  transformer-engine:\n    "aaaaaaaaaa"') > again.index("by a trainer")
    assert all(line[0] == "+" for line in changes(COMMENTED, again))


def test_the_newest_commit_of_the_first_distribution_stays_with_it():
    """Where another one follows: the marks of a block lie where the next one begins."""
    text = COMMENTED
    for distribution, letter in (("megatron-core", "a"), ("transformer-engine", "b"), ("megatron-core", "c")):
        text = with_commit(text, distribution, Commit(letter * 10, letter * 40, "1.0", "2026-01-01", "main"))
    found = yaml.safe_load(text)["commits"]
    assert {name: list(commits) for name, commits in found.items()} == {
        "megatron-core": ["a" * 10, "c" * 10],
        "transformer-engine": ["b" * 10],
    }


def test_commits_stand_by_their_days():
    early, late = (COMMIT.__class__(c * 10, c * 40, "0.20.0", f"2026-0{n}-01", "dev") for c, n in (("b", 1), ("c", 9)))
    found = COMMENTED
    for commit in (COMMIT, late, early):
        found = with_commit(found, "megatron-core", commit)
    assert list(yaml.safe_load(found)["commits"]["megatron-core"]) == ["b" * 10, "a" * 10, "c" * 10]
    assert all(line[0] == "+" for line in changes(COMMENTED, found))


def test_a_commit_keeps_the_comment_of_the_next_one():
    found = with_commit(COMMENTED, "megatron-core", COMMIT).replace('    "aaa', '    # about a\n    "aaa')
    early = Commit("b" * 10, "b" * 40, "0.20.0", "2026-01-01", "dev")
    assert "      of: dev\n    # about a\n" in with_commit(found, "megatron-core", early)


def test_the_newest_bound_and_what_ends_there():
    assert top_bound(COMMENTED, "a-fix", "megatron-core", "0.19.0") == ("0.19", {"two"})
    assert top_bound(COMMENTED, "a-fix", "megatron-core", "0.19.0rc1") == ("0.19", {"two"})
    assert top_bound(COMMENTED, "a-fix", "megatron-core", "0.18.5") is None
    assert top_bound(COMMENTED, "a-fix", "transformer-engine", "0.18") == ("0.18", {"two"})


def test_ranges_of_one_variant_and_bound_are_widened():
    """And no other text that looks like them."""
    found = with_wider_ranges(COMMENTED, "a-fix", "megatron-core", "two", "0.19", "0.20")
    assert changes(COMMENTED, found) == [
        '-           - {megatron-core: ">=0.18,<0.19"}',
        '+           - {megatron-core: ">=0.18,<0.20"}',
    ]
    found = with_wider_ranges(COMMENTED, "a-fix", "megatron-core", "two", "0.18", "0.18.5")
    assert '">=0.17, <0.18.5", transformer-engine: "<0.18"' in found
    found = with_wider_ranges(COMMENTED, "a-fix", "megatron-core", "upstream", "0.16", "0.17")
    assert '{megatron-core: ">=0.15,<0.17", note: "<0.19"}' in found
    assert with_wider_ranges(COMMENTED, "a-fix", "megatron-core", "one", "0.19", "0.20") == COMMENTED


def test_a_rule_beside_the_variants_is_widened_too():
    """The older form, with a key `variant`. A bound that is no plain release is left to people."""
    assert top_bound(MATRIX, "roll-fix", "megatron-core", "0.19.0") is None
    text = MATRIX.replace(".dev0", "")
    assert top_bound(text, "roll-fix", "megatron-core", "0.19.0") == ("0.19.0", {"upstream"})
    found = with_wider_ranges(text, "roll-fix", "megatron-core", "new", "0.18.0", "0.19")
    assert '{megatron-core: ">=0.17.0,<0.19", variant: new}' in found


@pytest.mark.no_cover
def test_every_newest_range_of_the_shipped_matrix_can_be_widened(tmp_path):
    """As text; the rules read from it are the same but for the bound. (`make test`: those of every fourth patch.)"""
    text, matrix = matrix_path().read_text("utf-8"), load_matrix()
    widened = list(matrix.patches)[:: times(4, 1)]
    for id in widened:
        entry = matrix.patches[id]
        bound, variants = top_bound(text, id, entry.distribution, "99.0")
        for variant in variants:
            text = with_wider_ranges(text, id, entry.distribution, variant, bound, "99.1")
    file = tmp_path / "version_matrix.yaml"
    file.write_text(text, "utf-8")
    wider = load_matrix(file, pins=False)
    for id in widened:
        entry = wider.patches[id]
        assert entry.pinned_rule(Version("99.0")) is not None, id
        assert len(entry.rules) == len(matrix.patches[id].rules)


RULES = """\
patches:
  ended: # and more
    one: ">=0.16,<0.17"
    two: ">=0.17,<0.21"
    not_needed: {megatron-core: ">=0.12,<0.16", note: "as before"}
  listed:
    one:
      - ">=0.12,<0.14"
      - ">=0.16,<0.21"  # again
    two: ">=0.14,<0.16"
  of-two:
    one: {megatron-core: ">=0.16,<0.21", transformer-engine: ">=2.0"}
  from-here:
    one: ">=0.20,<0.21"
  described:
    variants:
      one: {applies: {megatron-core: ">=0.16,<0.19"}}
"""


@pytest.mark.parametrize(
    ("id", "gives", "begin", "changed"),
    [
        (
            "ended",
            "upstream",
            "0.20",
            [
                '-     two: ">=0.17,<0.21"',
                '+     two: ">=0.17,<0.20"',
                '+     upstream: {megatron-core: ">=0.20,<0.21", note: "why: \\"so\\""}',
            ],
        ),
        (
            "ended",
            "not-needed",
            "0.21",
            [
                '-     not_needed: {megatron-core: ">=0.12,<0.16", note: "as before"}',
                "+     not_needed:",
                '+       - {megatron-core: ">=0.12,<0.16", note: "as before"}',
                '+       - {megatron-core: ">=0.21,<0.22", note: "why: \\"so\\""}',
            ],
        ),
        (  # a patch release
            "ended",
            "one",
            "0.20.1",
            [
                '-     one: ">=0.16,<0.17"',
                '-     two: ">=0.17,<0.21"',
                "+     one:",
                '+       - ">=0.16,<0.17"',
                '+       - ">=0.20.1,<0.21"',
                '+     two: ">=0.17,<0.20.1"',
            ],
        ),
        ("listed", "one", "0.22", ['+       - ">=0.22,<0.23"']),
        ("of-two", "upstream", "0.20", None),
        ("from-here", "upstream", "0.20", None),
        ("described", "upstream", "0.20", None),
        ("gone", "upstream", "0.20", None),
    ],
)
def test_a_new_range_ends_the_one_that_held_the_release(id, gives, begin, changed):
    """None is left to a person."""
    minor = Version(begin).minor
    found = with_new_range(RULES, id, "megatron-core", gives, begin, f"0.{minor + 1}", 'why: "so"')
    assert (None if found is None else sorted(changes(RULES, found))) == (None if changed is None else sorted(changed))


def test_the_new_range_ends_where_the_other_did():
    found = with_new_range(RULES, "listed", "megatron-core", "two", "0.18", "0.19")
    assert yaml.safe_load(found)["patches"]["listed"] == {
        "one": [">=0.12,<0.14", ">=0.16,<0.18"],
        "two": [">=0.14,<0.16", ">=0.18,<0.21"],
    }
    assert "# again" in found
