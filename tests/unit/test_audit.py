"""What an audit says about a release that nobody has pinned: verdicts, diffs, lost names; for people and machines."""

import json
import re
import zipfile

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, REWORKED, megatron, metadata, write_file

from shim._errors import NotMetError, OptionError
from shim._matrix.load import load_matrix
from shim._record import replace
from shim._releases.trees import open_tree
from shim._te import names as _wanted
from shim._te.names import Names, measure_names, render_names
from shim._tools.audit import VERDICTS, Difference, audit
from shim._tools.audit_report import as_markdown, as_text
from shim._tools.cli import main
from shim.testing.releases import FetchError

EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")
ROLL, FORWARD, HELPER = (f"megatron.core.roll:{name}" for name in ("roll", "Layer.forward", "helper"))


@pytest.fixture
def examine(world):
    """Audit what lies at a place; known releases are the fake ones, and `fetched` lists which were asked for."""

    def run(target, fetch=None):
        def known(distribution, release):
            run.fetched.append(release)
            return world.root / "releases" / release

        return audit(load_matrix(world.matrix), open_tree(str(target), fetch or known), fetch or known)

    run.fetched = []
    return run


@pytest.fixture
def verdicts(examine, tmp_path):
    """The findings about a source tree with this roll.py, by patch id."""

    def run(text, version="0.16.3"):
        megatron(tmp_path / "audited", version, {} if text is None else {"roll.py": text})
        run.audit = examine(tmp_path / "audited")
        return {finding.id: finding for finding in run.audit.findings}

    return run


def wheel_of(root, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(root).as_posix())
    return path


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
        (EDITED, "0.18.0", "upstream", "apply"),
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
    assert found["roll-fix"].verdict == "out-of-range"  # the newest release has the fix itself
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
        (CHILD.replace("        pass", "        def forward(self, x):\n            pass"), "drifted", "its own"),
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
    for rule in ('<0.17.0.dev0", variant: old', '<0.18.0.dev0", variant: new', '<0.19.0.dev0", note: mended'):
        assert rule in text
        text = text.replace(rule, rule.replace('dev0"', 'dev0", torch: ">=0.dev0"'))
    world.matrix.write_text(text)
    assert verdicts(BROKEN)["roll-fix"].verdict == "apply"
    assert "beside torch of unknown version" in verdicts.audit.findings[0].reason
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


def refuse_as_fetch(distribution, release):
    raise FetchError(f"could not download {release}:\nno route")


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
    found.append(examine("Megatron_Core==0.16.0", lambda distribution, release: root))
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
        ("numpy==1.0", "numpy is not audited"),
        ("megatron-core==..", "not a version"),
        ("megatron-core==0.16.x", "not a version"),
        ("megatron-core>=0.16", "nothing to audit"),
        ("megatron-core", "nothing to audit"),
        ("", "nothing to audit|neither"),
        ("a\0b", "nothing to audit"),
        ("/gone", "nothing to audit"),
        ("/dev/null", "nothing to audit"),
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
    (tmp_path / "file.whl").write_text("no wheel")
    with pytest.raises(OptionError, match="is not a wheel"):
        examine(tmp_path / "file.whl")


# For people and machines


@pytest.fixture
def shim(world, capsys, monkeypatch):
    """The command; known releases are the fake ones."""
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    monkeypatch.setattr("shim.testing.releases.fetch", lambda release, *_: world.root / "releases" / release)

    def run(*arguments):
        code = main([*map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_exit_codes_say_whether_somebody_has_to_look(shim, tmp_path):
    """0: nothing drifted; 1: something did; 2: there is nothing to audit."""
    assert shim("audit", "megatron-core==0.16.0")[0] == 0
    assert shim("audit", megatron(tmp_path / "new", "0.16.1", {"roll.py": EDITED}))[0] == 1
    code, out, err = shim("audit", tmp_path / "gone")
    assert (code, out) == (2, "") and re.fullmatch(r"shim: [^\n]+\n", err)


def test_a_release_that_cannot_be_fetched_is_not_met(shim, monkeypatch):
    """Named on the command line, it is all there was to audit."""

    def fetch(release, distribution, progress):
        progress("fetching")
        raise FetchError("no route")

    monkeypatch.setattr("shim.testing.releases.fetch", fetch)
    assert shim("audit", "megatron-core==0.16.0") == (1, "", "fetching\nshim: no route\n")


def test_offline_the_command_prints_its_verdict(shim, monkeypatch, tmp_path):
    """It needs the network for the diff only."""
    monkeypatch.setattr("shim.testing.releases.fetch", lambda release, *_: refuse_as_fetch("", release))
    code, out, _ = shim("audit", megatron(tmp_path / "new", "0.16.1", {"roll.py": EDITED}))
    assert code == 1
    assert "drifted           roll-fix" in out and "could not download" in out


def test_json_has_the_documented_keys(shim, tmp_path):
    """docs/cli.md lists them."""
    _, out, _ = shim("audit", "--json", megatron(tmp_path / "new", "0.16.1", {"roll.py": EDITED}))
    found = json.loads(out)
    assert set(found) == {"target", "audited", "clean", "patches", "lost_names", "notes"}
    assert (found["target"], found["clean"], found["notes"]) == (str(tmp_path / "new"), False, [])
    assert found["audited"]["megatron-core"]["version"] == "0.16.1"
    assert set(found["patches"]) == {"roll-fix", "faster-forward"}
    patch = found["patches"]["roll-fix"]
    assert set(patch) == {"kind", "distribution", "verdict", "reason", "variant", "differences"}
    assert set(patch["differences"][0]) == {"target", "role", "why", "nearest", "diff"}
    assert patch["differences"][0]["role"] == "binds"


def test_text_says_verdict_reason_and_diff(shim, tmp_path):
    """For a terminal."""
    out = shim("audit", megatron(tmp_path / "new", "0.16.1", {"roll.py": EDITED}))[1]
    assert "  drifted           roll-fix: megatron-core 0.16.1 differs at megatron.core.roll:roll" in out
    assert "    binds megatron.core.roll:roll: its body is not that of any pinned release (from 0.16.0)" in out
    assert "      +    return helper(x) + 1" in out
    assert "  applies as it is  faster-forward: " in out


def test_markdown_names_the_gates_that_can_go(shim):
    """What whoever follows main wants to know first."""
    out = shim("audit", "--markdown", "megatron-core==0.18.0")[1]
    assert "so gates for them can go: roll-fix." in out
    assert "so gates for them can go" not in shim("audit", "--markdown", "megatron-core==0.16.0")[1]


def check_markdown(text):
    """Tables have as many cells in each row, fences and details are closed, and there is no HTML but ours."""
    fence, width, details, prose = "", 0, 0, []
    for line in text.split("\n"):
        if fence:
            fence = "" if line == fence else fence
            assert not line.lstrip(" ").startswith(fence) or not fence, line
            continue
        opened = re.match("`{3,}", line)
        if opened:
            fence = opened[0]
            continue
        cells = len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, line
        width = cells
        details += line.count("<details>") - line.count("</details>")
        prose.append(line)
    assert fence == "" and details == 0
    ours = re.sub(r"</?(details|summary|code)>", "", "\n".join(prose))
    assert not re.search(r"(?<!\\)<", ours), ours


HOSTILE_TEXT = "<script>alert(1)</script> | ``` ~~~ </details> [x](y) **b** \\| &amp; \x1b[31m"


def test_markdown_is_well_formed_whatever_a_tree_holds(world, examine, tmp_path):
    """Backticks, pipes and HTML in bodies, versions and paths."""
    body = EDITED.replace("helper(x) + 1", f"helper(x), {HOSTILE_TEXT!r}, '''```\n```` | </details>\n'''")
    place = tmp_path / "a|b`c<i>d__e__"
    root = megatron(place, None, {"roll.py": body})
    write_file(
        root / "megatron/core/package_info.py",
        f"MAJOR, x = 0, 1\nMAJOR = 0\nMINOR = 16\nPATCH = 0\nPRE_RELEASE = {HOSTILE_TEXT + chr(10) + '# evil'!r}\n",
    )
    found = examine(root)
    text = as_markdown(found)
    check_markdown(text)
    assert "\x1b" not in text and "\n# evil" not in text
    assert "\n# evil" not in as_text(found) and "\x1b" not in as_text(found)
    (root / "megatron/core/roll.py").write_text("def roll(:\n")  # the reason holds the path
    check_markdown(as_markdown(examine(root)))


def test_no_line_of_a_diff_closes_its_fence(examine, world):
    """A line of context with a fence in it, indented by one space, would."""
    found = examine(world.root / "releases/0.16.0")
    difference = Difference(ROLL, True, "", "0.16.0", (" ```", " ````` <b>", "+</details>"))
    finding = replace(found.findings[0], verdict="drifted", differences=(difference,))
    text = as_markdown(replace(found, findings=(finding,)))
    assert "\n``````diff\n ```\n" in text
    check_markdown(text)


def test_markdown_shows_names_as_they_are():
    """`__init__` in a reason is no bold text."""
    from shim._tools.audit_report import _cell

    assert _cell("Layer.__init__ is\ngone") == r"Layer.\_\_init\_\_ is gone"


def test_a_path_that_is_not_text_is_printed(shim, tmp_path):
    """File names are bytes; JSON, Markdown and text survive the ones that are no UTF-8."""
    root = megatron(tmp_path / "caf\udce9\nnew line", "0.16.1", {"roll.py": EDITED})
    assert json.loads(shim("audit", "--json", root)[1])["target"] == str(root)


def test_every_verdict_has_words():
    """A new state of a match would be a KeyError in the text."""
    assert set(VERDICTS) == {"apply", "upstream", "drifted", "gone", "out-of-range"}


# Names of Transformer Engine

WANTED = {
    "transformer_engine.pytorch:Linear": ["2.1.0", "2.2.0", "2.3.0"],
    "transformer_engine.pytorch.attention:SplitAlongDim": ["2.1.0", "2.2.0"],
    "transformer_engine.pytorch.attention:FusedRoPE.apply": ["2.1.0"],
    "transformer_engine.pytorch.ep:dispatch": ["2.3.0"],
    "transformer_engine.pytorch:never": [],
}


@pytest.fixture
def engine(world, examine, tmp_path, monkeypatch):
    """Audit a fake Transformer Engine whose files have this text, against WANTED."""
    for release in ("2.1.0", "2.2.0", "2.3.0"):
        (world.root / "releases" / release).mkdir()
    world.pin(MATRIX.replace("\n\npatches", '\n  transformer-engine: ["2.1.0", "2.2.0", "2.3.0"]\n\npatches', 1))
    names = {name: {"wanted_by": ["0.16.0", "0.18.0"], "in": found} for name, found in WANTED.items()}
    monkeypatch.setattr(_wanted, "wanted_names", lambda: names)

    def run(version, files):
        root = tmp_path / "te"
        for name, text in {"__init__.py": "", "pytorch/__init__.py": "", **files}.items():
            write_file(root / "transformer_engine" / name, text)
        if version is not None:
            write_file(root / "build_tools/VERSION.txt", version)
        return examine(root)

    return run


def test_names_are_newly_lost_lost_before_or_not_yet_there(engine):
    """Only what the release before still had is news; the order is by urgency."""
    found = engine("2.3.0", {"pytorch/__init__.py": "class Linear: pass\n"})
    assert [(name.name.partition(":")[2], name.last_seen, name.comes_with, name.newly) for name in found.lost] == [
        ("SplitAlongDim", "2.2.0", "", True),
        ("FusedRoPE.apply", "2.1.0", "", False),
        ("dispatch", "", "2.3.0", False),
        ("never", "", "", False),
    ]
    assert found.lost[0].wanted == "0.16.0 - 0.18.0"
    assert found.clean is False


@pytest.mark.parametrize(
    ("version", "clean", "newly"), [("2.1.0", True, 0), ("2.2.0", False, 3), ("2.4.0", False, 2), (None, False, 2)]
)
def test_clean_is_about_what_is_new(engine, version, clean, newly):
    """A name that was lost long ago must not make every daily run red; the first release has nothing before it, and
    an unknown version counts as the newest."""
    found = engine(version, {})
    assert len(found.lost) == len(WANTED)
    assert (found.clean, sum(name.newly for name in found.lost)) == (clean, newly)


def test_a_member_is_lost_with_its_class(engine, monkeypatch):
    """One line for both; a class that is there can still have lost the member."""
    names = {f"transformer_engine.m:{name}": {"wanted_by": ["0.16.0"], "in": []} for name in ("C.f", "C", "D", "D.f")}
    monkeypatch.setattr(_wanted, "wanted_names", lambda: names)
    found = engine("2.3.0", {"m.py": "class D: pass\n"})
    assert [name.name.partition(":")[2] for name in found.lost] == ["C", "D.f"]


def test_lost_names_are_in_text_json_and_markdown(engine):
    """With who wants them, and where they are to be found."""
    found = engine("2.3.0", {"pytorch/__init__.py": "Linear = 1\n"})
    name = "transformer_engine.pytorch.attention:SplitAlongDim"
    assert f"  lost name: {name}, wanted by megatron-core 0.16.0 - 0.18.0, last seen in 2.2.0 (newly lost)" in as_text(
        found
    )
    assert f"| `{name}` | 0.16.0 - 0.18.0 | last seen in 2.2.0 (newly lost) |" in as_markdown(found)
    check_markdown(as_markdown(found))
    assert found.to_dict()["lost_names"][0] == {
        "name": name,
        "wanted_by": "0.16.0 - 0.18.0",
        "last_seen": "2.2.0",
        "comes_with": "",
        "newly": True,
    }


@pytest.fixture
def has(tmp_path):
    """Whether a name is there in a fake Transformer Engine."""

    def run(name, files):
        from shim._releases.sources import Sources

        for path, text in {"__init__.py": "", **files}.items():
            write_file(tmp_path / "te/transformer_engine" / path, text)
        return Names(Sources([tmp_path / "te"])).has(f"transformer_engine.{name}")

    return run


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("def wanted(): pass\n", True),
        ("async def wanted(): pass\n", True),
        ("class wanted: pass\n", True),
        ("wanted = 1\n", True),
        ("a, (b, wanted) = 1, (2, 3)\n", True),
        ("wanted: int = 1\n", True),
        ("import wanted\n", True),
        ("import numpy as wanted\n", True),
        ("from .other import there as wanted\n", True),
        ("from torch import wanted\n", True),
        ("if X:\n    wanted = 1\n", True),
        ("try:\n    from torch import wanted\nexcept ImportError:\n    pass\n", True),
        ("with x:\n    for y in z:\n        wanted = 1\n", True),
        ("from .other import *\n", False),
        ("from .stars import *\n", True),
        ("from transformer_engine.stars import *\n", True),
        ("from transformer_engine_torch import *\n", True),
        ("from torch import *\n", True),
        ("from . import gone\nfrom .gone import *\n", False),
        ("from .m import *\n", False),
        ("def f():\n    wanted = 1\n", False),
        ("x.wanted = 1\nprint(wanted)\n", False),
        ("'''\nwanted = 1\n'''\n", False),
        ("", False),
        ("def wanted(:\n", False),
    ],
)
def test_a_name_is_there_where_an_import_would_find_it(has, text, there):
    """Defined, imported or passed on; what comes from the compiled extension or elsewhere counts as there."""
    files = {"m.py": text, "other.py": "there = 1\n", "stars.py": "from .deep import *\n", "deep.py": "wanted = 1\n"}
    assert has("m:wanted", files) is there


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("class C:\n    def f(self): pass\n", True),
        ("class C(object):\n    f = 1\n", True),
        ("class C:\n    if X:\n        f = 1\n", True),
        ("class C:\n    def g(self): self.f = 1\n", False),
        ("class C(object): pass\n", False),
        ("class C(Base): pass\n", True),
        ("C = make()\n", True),
        ("from .other import C\n", True),
        ("from .other import D as C\n", False),
        ("from .other import *\n", True),
        ("from torch import C\n", True),
    ],
)
def test_members_of_classes_are_looked_for(has, text, there):
    """Through imports as well; what a base class may have counts as there."""
    other = "class C:\n    def f(self): pass\nclass D:\n    def g(self): pass\n"
    assert has("m:C.f", {"m.py": text, "other.py": other}) is there


def test_submodules_are_names(has):
    """`from transformer_engine.pytorch import ep` imports a module; a member is then looked for in there."""
    files = {"pytorch/__init__.py": "", "pytorch/ep.py": "def dispatch(): pass\n"}
    assert has("pytorch:ep", files)
    assert has("pytorch:ep.dispatch", files)
    assert not has("pytorch:ep.combine", files)


def test_what_megatron_imports_is_measured(tmp_path):
    """Plain, relative to an alias, guarded and inside functions; what it does not use is left out."""
    text = """
        import transformer_engine as te
        import transformer_engine.pytorch.fp8
        try:
            from transformer_engine.pytorch.attention import SplitAlongDim as Split, rope
            from transformer_engine.pytorch import *
        except ImportError:
            pass

        def f():
            from transformer_engine.common import recipe
            recipe.DelayedScaling.make()
            te.pytorch.Linear(1).weight
            transformer_engine.pytorch.fp8.FP8GlobalStateManager.reset()
            rope.apply()
    """
    write_file(tmp_path / "mcore/megatron/core/user.py", text)
    write_file(tmp_path / "te/transformer_engine/pytorch/__init__.py", "class Linear: pass\n")
    found = measure_names([("0.16.0", tmp_path / "mcore")], [("2.1.0", tmp_path / "te")])
    assert set(found) >= {
        "transformer_engine.pytorch.attention:SplitAlongDim",
        "transformer_engine.pytorch.attention:rope",
        "transformer_engine.pytorch.attention.rope:apply",
        "transformer_engine.common:recipe",
        "transformer_engine.common.recipe:DelayedScaling.make",
        "transformer_engine.pytorch:Linear",
        "transformer_engine.pytorch.fp8:FP8GlobalStateManager.reset",
    }
    assert found["transformer_engine.pytorch:Linear"] == {"wanted_by": ["0.16.0"], "in": ["2.1.0"]}
    assert json.loads(render_names(found)) == found


def test_the_shipped_list_of_names_belongs_to_the_supported_releases():
    """It is written by `shim pin`; after a change of the supported list it is stale."""
    supported = load_matrix().supported
    names = json.loads(_wanted.FILE.read_text("utf-8"))
    assert names and _wanted.FILE.read_text("utf-8") == render_names(names)
    assert {r for found in names.values() for r in found["wanted_by"]} == set(supported["megatron-core"])
    assert {r for found in names.values() for r in found["in"]} == set(supported["transformer-engine"])
