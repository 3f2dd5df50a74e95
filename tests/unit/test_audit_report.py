"""What an audit prints for people and machines: exit codes, JSON, text, and Markdown that no tree can break."""

import json
import re
from dataclasses import replace

import pytest
from audit_cases import EDITED, check_markdown, refuse_as_fetch
from unit_helpers import megatron, write_file

from shim._tools.audit import Difference
from shim._tools.audit_report import as_markdown, as_text
from shim._tools.cli import main
from shim.testing.releases import FetchError

ROLL, FORWARD, HELPER = (f"megatron.core.roll:{name}" for name in ("roll", "Layer.forward", "helper"))


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
    assert set(found) == {*("target", "commit", "audited", "beside", "clean", "patches", "lost_names", "notes")}
    assert (found["commit"], found["beside"]) == ("", {})
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


def test_formats(shim):
    """Each has its option; the two older ones are short for it. Two at once are wrong usage."""
    said = {name: shim("audit", "--format", name, "==0.18.0") for name in ("text", "markdown", "json")}
    assert {code for code, _, _ in said.values()} == {0}
    assert said["text"] == shim("audit", "==0.18.0") and said["text"][1].startswith("audit of megatron-core==0.18.0\n")
    assert said["markdown"] == shim("audit", "--markdown", "==0.18.0") and said["markdown"][1].startswith(
        "### shim audit"
    )
    assert said["json"] == shim("audit", "--json", "==0.18.0") and json.loads(said["json"][1])["clean"]
    for both in (["--json", "--markdown"], ["--json", "--format", "text"], ["--format", "yaml"]):
        with pytest.raises(SystemExit) as left:
            shim("audit", "==0.18.0", *both)
        assert left.value.code == 2


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
    from shim._printing.markdown import plain

    assert plain("Layer.__init__ is\ngone") == r"Layer.\_\_init\_\_ is gone"


def test_a_path_that_is_not_text_is_printed(shim, tmp_path):
    """File names are bytes; JSON, Markdown and text survive the ones that are no UTF-8."""
    root = megatron(tmp_path / "caf\udce9\nnew line", "0.16.1", {"roll.py": EDITED})
    assert json.loads(shim("audit", "--json", root)[1])["target"] == str(root)
