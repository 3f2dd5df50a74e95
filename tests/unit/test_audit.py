"""What an audit says about a release that nobody has pinned: verdicts, diffs, and where a release may lie."""

import re
import zipfile

import pytest
from audit_cases import EDITED, refuse_as_fetch, wheel_of
from unit_helpers import BROKEN, FIXED, MATRIX, REWORKED, megatron, metadata, write_file

from shim._errors import NotMetError, OptionError
from shim._tools.audit_report import as_markdown, as_text

ROLL, FORWARD, HELPER = (f"megatron.core.roll:{name}" for name in ("roll", "Layer.forward", "helper"))


# Verdicts


@pytest.mark.parametrize(
    ("text", "version", "roll", "forward"),
    [
        (BROKEN, "0.16.0", "apply", "apply"),
        (BROKEN, "0.16.7", "apply", "apply"),
        (BROKEN, "0.19.0.dev0", "apply", "apply"),
        (BROKEN, None, "apply", "apply"),
        (REWORKED, "0.16.0", "apply", "apply"),
        (FIXED, "0.18.0", "upstream", "apply"),
        (FIXED, "0.16.0", "upstream", "apply"),
        (EDITED, "0.16.3", "drifted", "apply"),
        (EDITED, None, "drifted", "apply"),
        (EDITED, "0.20.0", "drifted", "apply"),
        (EDITED, "0.15.0", "out-of-range", "apply"),
        (EDITED, "0.18.0", "drifted", "apply"),
        ("x = 1\n", "0.16.3", "gone", "gone"),
        (None, "0.17.1", "gone", "gone"),
        (None, "0.15.0", "out-of-range", "out-of-range"),
    ],
)
def test_bodies_decide_and_the_version_only_where_they_are_unknown(verdicts, text, version, roll, forward):
    """Every verdict there is, for a patch that ends with 0.18 and for one that goes on."""
    found = verdicts(text, version)
    assert (found["roll-fix"].verdict, found["faster-forward"].verdict) == (roll, forward)
    amiss = {roll, forward} & {"drifted", "gone"}
    assert verdicts.audit.clean is not bool(amiss)


def test_all_targets_gone_after_the_newest_release_is_not_out_of_range(verdicts):
    """No range speaks of tomorrow's main; what the newest release still needed has lost its targets there, and that
    must not pass for clean."""
    found = verdicts(None, "0.20.0")
    assert found["faster-forward"].verdict == "gone"
    assert [d.why for d in found["faster-forward"].differences] == ["there is no module megatron.core.roll"]
    assert found["roll-fix"].verdict == "gone"  # the newest release has the fix, and nobody knows what became of it
    assert not verdicts.audit.clean


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BROKEN.replace("def roll(", "def rolls("), "megatron.core.roll has no roll"),
        (BROKEN.replace("class Layer", "class Layers"), "megatron.core.roll has no Layer.forward"),
        (BROKEN.replace("def forward", "def backward"), "megatron.core.roll has no Layer.forward"),
        (None, "there is no module megatron.core.roll"),
    ],
)
def test_a_target_is_gone_with_its_function_class_or_module(verdicts, text, why):
    """And the reason says which."""
    found = verdicts(text)["roll-fix"]
    assert found.verdict == "gone"
    assert why in [difference.why for difference in found.differences]
    assert all(difference.diff == () for difference in found.differences)


def test_what_a_patch_relies_on_can_be_gone_without_its_target(verdicts):
    """The patch has drifted then; its target is there."""
    found = verdicts(BROKEN.replace("def helper", "def helped"))["roll-fix"]
    assert found.verdict == "drifted"
    [difference] = found.differences
    assert (difference.target, difference.bound) == (HELPER, False)


def test_a_file_that_cannot_be_read_has_drifted(verdicts):
    """It may use syntax that is newer than this Python; nobody is told that the target is gone."""
    found = verdicts("def roll(:\n")["roll-fix"]
    assert found.verdict == "drifted"
    assert "cannot be parsed" in found.reason


INHERITED = MATRIX.replace(
    'targets: ["megatron.core.roll:Layer.forward"]\n    applies',
    'targets: [{target: "megatron.core.roll:Child.forward", inherits: "megatron.core.roll:Layer.forward"}]\n'
    "    applies",
)
CHILD = BROKEN + "\n    class Child(Layer):\n        pass\n"


@pytest.mark.parametrize(
    ("child", "verdict", "why"),
    [
        (CHILD, "apply", None),
        (CHILD.replace("class Child", "class Kid"), "gone", "has no class Child"),
        (CHILD.replace("        pass", "        def forward(self, x):\n            pass"), "drifted", "now defines"),
        (CHILD.replace("return roll(x)", "return x"), "drifted", "not that of any pinned release"),
    ],
)
def test_an_inherited_target_is_gone_with_the_class_that_inherits_it(world, verdicts, child, verdict, why):
    """Its body is that of the base class, which may well be there still."""
    for release in ("0.16.0", "0.17.0", "0.18.0"):
        file = world.root / "releases" / release / "megatron/core/roll.py"
        file.write_text(file.read_text() + "\nclass Child(Layer):\n    pass\n")
    world.pin(INHERITED)
    found = verdicts(child)["faster-forward"]
    assert found.verdict == verdict
    assert why is None or why in found.reason


# Diffs


def test_a_drifted_target_is_shown_as_a_diff(verdicts, examine):
    """From the nearest known body, without docstrings and comments."""
    text = EDITED.replace("def roll(x, shift=-1):", 'def roll(x, shift=-1):\n        "Rolls."  # really')
    [difference] = verdicts(text)["roll-fix"].differences
    assert (difference.target, difference.bound, difference.nearest) == (ROLL, True, "0.16.0")
    assert difference.diff == (
        "--- megatron-core 0.16.0",
        "+++ audited",
        "@@ -1,2 +1,2 @@",
        " def roll(x, shift=-1):",
        "-    return helper(x)",
        "+    return helper(x) + 1",
    )


def test_a_body_that_a_patch_relies_on_is_shown_too(verdicts):
    """With its role; the patch does not bind it."""
    [difference] = verdicts(BROKEN.replace("return x\n", "return x * 2\n", 1))["roll-fix"].differences
    assert (difference.target, difference.bound) == (HELPER, False)
    assert difference.diff[-2:] == ("-    return x", "+    return x * 2")


def test_the_diff_begins_from_the_body_most_like_it_not_from_the_nearest_version(verdicts):
    """A fork of 0.16 with the roll of 0.17, changed a little."""
    differences = verdicts(REWORKED.replace("return helper(x)", "return helper(x) + 1"), "0.16.9")["roll-fix"]
    [roll] = [difference for difference in differences.differences if difference.target == ROLL]
    assert roll.nearest == "0.17.0"
    assert [line for line in roll.diff if line[0] in "+-"][2:] == ["-    return helper(x)", "+    return helper(x) + 1"]


def test_of_releases_with_the_same_body_the_nearest_is_named(verdicts):
    """Below, between and above them; the one before it where two are as near."""
    text = BROKEN.replace("return x\n", "return x * 2\n", 1)  # helper is the same in all three
    for version, nearest in (("0.16.0", "0.16.0"), ("0.16.5", "0.16.0"), ("0.17.3", "0.17.0"), ("0.20.0", "0.18.0")):
        differences = {d.target: d.nearest for d in verdicts(text, version)["roll-fix"].differences}
        # A release with the fix is no place to begin from.
        assert differences.get(HELPER) == {"0.18.0": "0.17.0"}.get(nearest, nearest), version


COMMIT = """
commits:
  megatron-core:
    "0123456789":
      commit: "0123456789012345678901234567890123456789"
      version: "0.17.1.dev0"
      date: "2026-08-22"
      of: main
"""


@pytest.mark.parametrize(("text", "nearest"), [(REWORKED, "0.17.0"), (REWORKED.replace("shift", "by"), "0123456789")])
def test_a_diff_begins_from_a_commit_only_where_no_release_has_its_body(world, verdicts, monkeypatch, text, nearest):
    """A wheel is fetched sooner than a repository. The header says what the commit is."""
    said = {"bodies": {"": "0123456789"}, "verdict": "fixed", "variant": "new", "shown": "", "dropped": []}
    found = {"trees": {"0123456789": {"date": "2026-11-25"}}, "patches": {"roll-fix": [said]}}
    monkeypatch.setattr("shim._planning.evidence.known_trees", lambda: found)
    megatron(world.root / "releases/0123456789", "0.17.1", {"roll.py": text})
    world.pin(MATRIX.replace("\n\npatches:", f"\n{COMMIT}\npatches:", 1))
    [roll] = verdicts(text.replace("return helper(x)", "return helper(x) + 1"), "0.17.2")["roll-fix"].differences
    assert (roll.target, roll.nearest) == (ROLL, nearest)
    shown = "commit 0123456789 (main of 2026-08-22)" if nearest == "0123456789" else nearest
    assert roll.diff[0] == f"--- megatron-core {shown}"


def test_a_body_of_another_release_is_compared_with_those_that_the_variant_has(verdicts):
    """It is known where it comes from; what it lacks here is the question, and a diff from itself would be empty."""
    [difference] = verdicts(BROKEN.replace("return roll(x)", "return roll(x, dims=0)"))["roll-fix"].differences
    assert (difference.target, difference.nearest) == (FORWARD, "0.16.0")
    assert difference.why == "its body is that of megatron-core 0.18.0, which needs no patch"
    assert [line for line in difference.diff if line[0] in "+-"][2:] == [
        "-    return roll(x)",
        "+    return roll(x, dims=0)",
    ]


def test_a_rule_that_speaks_of_what_is_not_audited_has_a_verdict(world, verdicts):
    """Only the tree is audited; what it will run beside is open."""
    text = world.matrix.read_text()
    for rule in ('<0.17.0.dev0", variant: old', '<0.18.0.dev0", variant: new', '<0.19.0.dev0", note: fixed'):
        assert rule in text
        text = text.replace(rule, rule.replace('dev0"', 'dev0", transformer-engine: ">=0.dev0"'))
    world.matrix.write_text(text)
    assert verdicts(BROKEN)["roll-fix"].verdict == "apply"
    assert "beside transformer-engine of unknown version" in verdicts.audit.findings[0].reason
    assert verdicts(EDITED)["roll-fix"].verdict == "drifted"
    assert verdicts.audit.to_dict() and as_text(verdicts.audit) and as_markdown(verdicts.audit)


def test_a_change_of_the_guards_alone_is_shown(verdicts):
    """They count in the fingerprint, so a diff without them would be empty."""
    text = BROKEN.replace("def roll(x", "if FAST:\n      def roll(x").replace("return helper(x)", "  return helper(x)")
    [difference] = verdicts(text)["roll-fix"].differences
    assert "+# under: if FAST" in difference.diff


def test_long_signatures_are_broken_up(verdicts, world):
    """So that a diff shows the parameter that is new, not a line of a thousand characters twice."""
    many = ", ".join(f"parameter_{i}=None" for i in range(30))
    file = world.root / "releases/0.16.0/megatron/core/roll.py"
    file.write_text(file.read_text().replace("shift=-1", f"shift=-1, {many}"))
    world.pin(MATRIX)
    [difference] = verdicts(BROKEN.replace("shift=-1", f"shift=-1, {many}, more=1"))["roll-fix"].differences
    assert [line for line in difference.diff[3:] if line[0] in "+-"] == [
        "-    parameter_29=None):",
        "+    parameter_29=None,",
        "+    more=1):",
    ]


def test_a_long_diff_is_cut(verdicts):
    """A pull request is not the place for a whole function; the number of lines left out is said."""
    lines = "".join(f"        x = {i}\n" for i in range(500))
    [difference] = verdicts(BROKEN.replace("        return helper(x)", lines + "        return 'a' * 3", 1))[
        "roll-fix"
    ].differences
    assert len(difference.diff) == 61 and re.fullmatch(r"\.\.\. \d+ more lines", difference.diff[-1])
    [difference] = verdicts(BROKEN.replace("return helper(x)", f"return {'y' * 10_000}"))["roll-fix"].differences
    assert max(map(len, difference.diff)) < 500


def test_nothing_is_fetched_that_no_diff_needs(verdicts, examine):
    """A daily job over a clean tree works offline."""
    verdicts(BROKEN)
    assert examine.fetched == []


def refuse(distribution, release):
    raise NotMetError(f"could not download {release}:\nno route")


def broken_wheel(distribution, release):
    raise zipfile.BadZipFile("could not download: no route")


@pytest.mark.parametrize("fetch", [refuse, refuse_as_fetch, broken_wheel])
def test_offline_the_verdict_stands_without_its_diff(examine, tmp_path, fetch):
    """A note says why, in one line."""
    found = examine(megatron(tmp_path / "audited", "0.16.3", {"roll.py": EDITED}), fetch)
    [drifted] = [finding for finding in found.findings if finding.verdict == "drifted"]
    assert drifted.differences[0].diff == () and not found.clean
    assert all("no route" in note and "\n" not in note for note in found.notes)
    assert any("no diff from megatron-core 0.16.0" in note for note in found.notes)


# Where a release may lie


def test_every_form_of_a_release_gives_the_same(examine, tmp_path, monkeypatch):
    """A directory, the package in it, one by a link, a relative path, a wheel, and a name."""
    root = megatron(tmp_path / "checkout", "0.16.0", {"roll.py": EDITED})
    wheel = wheel_of(root, tmp_path / "megatron_core-0.16.0-py3-none-any.whl")
    (tmp_path / "link").symlink_to(root / "megatron" / "core")
    monkeypatch.chdir(root / "megatron")
    places = [root, root / "megatron", root / "megatron/core", tmp_path / "link", "core", ".", "..", "core/..", wheel]
    found = [examine(place) for place in places]
    found += [examine(name, lambda *_: root) for name in ("Megatron_Core==0.16.0", "==0.16.0", "==0123456789")]
    for one in found:
        assert [(f.id, f.verdict, f.reason) for f in one.findings] == [
            (f.id, f.verdict, f.reason) for f in found[0].findings
        ]
        assert str(one.tree.environment.installed["megatron-core"].version) == "0.16.0"


def test_site_packages_with_both_distributions(examine, tmp_path):
    """The metadata says the versions; that of others does not matter."""
    megatron(tmp_path / "site", None, {"roll.py": BROKEN})
    write_file(tmp_path / "site/transformer_engine/__init__.py", "raise RuntimeError\n")
    for name, version in (("megatron-core", "0.16.0"), ("transformer-engine", "2.3.0"), ("torch", "9")):
        metadata(tmp_path / "site", version, name)
    found = examine(tmp_path / "site")
    assert {name: i.raw for name, i in found.tree.environment.installed.items()} == {
        "megatron-core": "0.16.0",
        "transformer-engine": "2.3.0",
    }
    assert found.lost  # nothing is in that one


@pytest.mark.parametrize("files", [{}, {"package_info.py": "MAJOR = f()\n"}, {"package_info.py": "MAJOR = (\n"}])
def test_a_tree_without_a_version_is_judged_by_its_bodies(examine, tmp_path, files):
    """Nothing of it is run to find one out; a note says so."""
    found = examine(megatron(tmp_path / "audited", None, {"roll.py": BROKEN, **files}))
    assert [finding.verdict for finding in found.findings] == ["apply", "apply"]
    assert found.notes == ("megatron-core: no readable version; judged by bodies alone",)


def test_a_checkout_of_transformer_engine_says_its_version_in_a_file(examine, tmp_path):
    """build_tools/VERSION.txt, as detection reads it."""
    write_file(tmp_path / "te/transformer_engine/__init__.py", "")
    write_file(tmp_path / "te/build_tools/VERSION.txt", "2.9.0.dev0\n")
    found = examine(tmp_path / "te")
    assert found.tree.environment.installed["transformer-engine"].raw == "2.9.0.dev0"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("numpy==1.0", "numpy is not audited; name megatron-core==1.0 or transformer-engine==1.0"),
        ("megatron-core==..", "not a version; name one release"),
        ("megatron-core==0.16.x", "not a version"),
        ("transformer-engine==x", "not a version; name one release, for instance transformer-engine=="),
        ("==", "name a release"),
        ("megatron-core>=0.16", "name one release with =="),
        ("~=0.16", "name one release with =="),
        ("megatron-core", r"say which release, for instance megatron-core==X, or \./megatron-core"),
        ("Transformer_Engine", "say which release, for instance transformer-engine==X"),
        ("main", "shim audit DIRECTORY --ref main"),
        ("core_v0.16.0", "shim audit DIRECTORY --ref core_v0.16.0"),
        ("d98e8a64ddf34856", "shim audit DIRECTORY --ref d98e8a64ddf34856"),
        ("https://example.org/a.whl", "no URL is fetched; clone it"),
        ("git+ssh://example.org/a", "no URL is fetched"),
        ("git@example.org:a/b", "no URL is fetched"),
        ("", "nothing to audit at ''"),
        ("a\0b", "name a release .*, a wheel, an sdist .* or a directory"),
        ("/gone", "there is no such file; name a release"),
        ("megatron_core-0.20.0.tar.gz", "there is no such file; name a release"),
        ("/dev/null", "name a release"),
    ],
)
def test_what_is_no_release_is_wrong_usage(examine, target, message, tmp_path, monkeypatch):
    """Before anything is fetched."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message):
        examine(target)
    assert examine.fetched == []


def test_a_directory_or_file_with_neither_package_is_wrong_usage(examine, tmp_path):
    """Also a wheel of something else."""
    write_file(tmp_path / "other/numpy/__init__.py", "")
    for place in (tmp_path / "other", wheel_of(tmp_path / "other", tmp_path / "numpy-1-py3-none-any.whl")):
        with pytest.raises(OptionError, match="neither megatron/core nor transformer_engine"):
            examine(place)
    megatron(tmp_path / "above/Megatron-LM", "0.16.0")
    with pytest.raises(OptionError, match="but in Megatron-LM; name that directory"):
        examine(tmp_path / "above")
    (tmp_path / "file.whl").write_text("no wheel")
    with pytest.raises(OptionError, match="is no archive that can be read"):
        examine(tmp_path / "file.whl")
