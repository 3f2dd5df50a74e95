"""`shim new-patch`: what it finds out about a target, and the skeleton that it writes."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pinned import write_pins
from unit_helpers import REPOSITORY, megatron

from shim._errors import NotMetError, OptionError
from shim._matrix.declared import Commit
from shim._matrix.load import load_matrix
from shim._matrix.model import Matrix
from shim._tools.cli import main
from shim.maintenance import new_patch
from shim.maintenance.new_patch_text import MARK
from shim.testing import releases as _releases  # noqa: F401 - it reads the matrix that ships at its import

TARGET = "megatron.core.roll:Layer.forward"
METHOD = """
class Layer:
    def forward(self, x{more}):
        return {value}
"""
OLD, WIDER = METHOD.format(more="", value="x"), METHOD.format(more=", y=None", value="x")
EDITED = METHOD.format(more=", y=None", value="(x, y)")
RELEASES = {"0.15.0": "", "0.15.2": OLD, "0.16.0": OLD, "0.16.1": WIDER, "0.17.0": EDITED}


@pytest.fixture
def fetch(tmp_path):
    """Releases of megatron-core with roll.py as in RELEASES."""
    for release, text in RELEASES.items():
        megatron(tmp_path / release, release, {"roll.py": text})
    return lambda distribution, release: tmp_path / release


def matrix_of(*releases):
    return Matrix("matrix.yaml", {}, {"megatron-core": releases}, {})


def propose(fetch, *targets, id="new-fix", releases=tuple(RELEASES)):
    return new_patch.propose(id, targets or (TARGET,), matrix_of(*releases), fetch)


def test_a_body_is_a_group_of_neighbours(fetch):
    assert [str(body) for body in propose(fetch).bodies] == [
        "not there  0.15.0",
        "body 1     0.15.2 - 0.16.0",
        "body 2     0.16.1",
        "body 3     0.17.0",
    ]


def test_bodies_that_are_called_alike_share_a_variant(fetch):
    """A wrapper serves them all; another signature needs another look."""
    found = propose(fetch)
    assert found.variants == {"v0_15_2": ("0.15.2", "0.16.0"), "v0_16_1": ("0.16.1", "0.17.0")}
    assert propose(fetch, releases=("0.16.1", "0.17.0")).variants == {"v0_16_1": ("0.16.1", "0.17.0")}


def test_ranges_leave_no_gap(fetch):
    """Each ends where the next begins, the last one with the minor release."""
    found = new_patch.ranges(propose(fetch), matrix_of(*RELEASES))
    assert found == {
        ("0.15.0",): ">=0.15,<0.15.2",
        ("0.15.2", "0.16.0"): ">=0.15.2,<0.16.1",
        ("0.16.1", "0.17.0"): ">=0.16.1,<0.18",
    }


def test_the_last_range_holds_the_newest_commit(fetch):
    """Without this no range holds a tree of that version."""
    commit = Commit("12345abcde", "12345abcde" * 4, "0.18.0.dev0", "2026-08-22", "main")
    matrix = replace(matrix_of(*RELEASES), commits={"megatron-core": {"12345abcde": commit}})
    assert new_patch.ranges(propose(fetch), matrix)["0.16.1", "0.17.0"] == ">=0.16.1,<0.19"


def test_a_wrong_name_is_told_with_the_right_one(fetch):
    with pytest.raises(NotMetError, match=r"did you mean 'Layer\.forward'"):
        propose(fetch, "megatron.core.roll:Layer.forwards")
    with pytest.raises(NotMetError, match=r"no supported release of megatron-core has megatron\.core\.rolls:roll"):
        propose(fetch, "megatron.core.rolls:roll")


@pytest.mark.parametrize(
    ("targets", "id", "says"),
    [
        ((TARGET,), "New_Fix", "lower-case words with hyphens"),
        ((TARGET,), "class", "lower-case words with hyphens"),
        (("megatron.core.roll",), "new-fix", "package.module:Qualified.name"),
        (("torch:roll",), "new-fix", "shim patches megatron-core and transformer-engine"),
        (("megatron:roll", "transformer_engine:roll"), "new-fix", "one distribution"),
    ],
)
def test_what_cannot_be_a_patch_is_refused(fetch, targets, id, says):
    with pytest.raises(OptionError) as raised:
        propose(fetch, *targets, id=id)
    assert says in str(raised.value)


def test_a_known_id_is_refused(fetch):
    with pytest.raises(OptionError, match="there is a patch mtp-recompute already"):
        new_patch.propose("mtp-recompute", [TARGET], load_matrix(), fetch)


MATRIX = """\
# The one source of truth.
supported:
  megatron-core: ["0.16.0"]

patches:
  first:  # a comment
    summary: one

    # another
    kind: compat

# What follows the patches.
{rest}"""


SECOND = "  second:\n    summary: two\n"


@pytest.mark.parametrize("rest", ["", "releases:\n  megatron-core: {}\n"])
def test_the_entry_stands_behind_another_and_all_else_stays(rest):
    """Comments, blank lines and order included."""
    before = MATRIX.format(rest=rest)
    after = new_patch.with_entry(before, SECOND, "first")
    assert after.replace(SECOND, "") == before and list(yaml.safe_load(after)["patches"]) == ["first", "second"]
    between = new_patch.with_entry(after, "  between:\n    summary: it\n", "first")
    assert between.partition("    kind: compat\n")[2].startswith(f"  between:\n    summary: it\n{SECOND}")
    foremost = new_patch.with_entry(before, SECOND)
    assert foremost.replace(SECOND, "") == before and list(yaml.safe_load(foremost)["patches"]) == ["second", "first"]


def test_a_new_patch_stands_behind_its_neighbour_by_name_and_outside_of_those_with_its_target():
    matrix = load_matrix()
    assert new_patch.place("rope-x", ["a:b"], matrix) == "rope-thd" and new_patch.place("a", ["a:b"], matrix) == ""
    (target,) = matrix.patches["masked-microbatch"].variants["v0_12"].targets
    sharing = [id for id, entry in matrix.patches.items() if target in entry.targets]
    assert len(sharing) > 1 and new_patch.place("a", [target], matrix) == sharing[-1]


@pytest.mark.parametrize("target", [TARGET, "megatron.core.roll:Layer"])
def test_module_and_test_are_code_and_keep_to_the_house_s_rules(fetch, tmp_path, target):
    """Ruff passes them as they are written, with whatever is still to be filled in."""
    found = propose(fetch, target)
    files = {
        "patches/megatron_core/new_fix/__init__.py": "",
        "patches/megatron_core/new_fix/proof.py": "",
        "tests/cells/test_new_fix.py": "",
    }
    top = REPOSITORY
    written = new_patch.write_patch(found, matrix_of(*RELEASES), top, dry_run=True)
    for path, text in written.items():
        name = path.relative_to(top).as_posix()
        if name in files:
            compile(text, name, "exec")
            files[name] = text
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert all(files.values()) and not any((top / name).exists() for name in files)
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed for this Python")
    for command in (["check"], ["format", "--check"]):
        options = ["--config", str(REPOSITORY / "pyproject.toml"), *(str(tmp_path / name) for name in files)]
        done = subprocess.run([ruff, *command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_generated_tests_fail_and_say_what_to_fill(fetch):
    """Each test function ends in a call of pytest.fail with the mark."""
    found = propose(fetch)
    text = new_patch.write_patch(found, matrix_of(*RELEASES), REPOSITORY, dry_run=True)
    tree = ast.parse(next(text for path, text in text.items() if path.name == "test_new_fix.py"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert len(tests) == 1
    for node in tests:
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "pytest.fail"]
        assert len(calls) == 1 and calls[0].args[0].value.startswith(MARK)


def test_this_checkout_has_nothing_left_to_fill():
    """`shim matrix` says the same; docs/writing-a-patch.md says how to go on."""
    assert new_patch.unfilled(REPOSITORY) == []


def test_only_a_source_checkout_is_written_to(tmp_path, monkeypatch, capsys):
    """Where shim is installed, the error says what to do instead."""
    monkeypatch.setattr("shim._matrix.load.PACKAGE", tmp_path / "shim")
    assert main(["new-patch", "new-fix", "--target", TARGET]) == 2
    said = capsys.readouterr().err
    assert "source checkout" in said and "Remedy: clone" in said
    assert list(tmp_path.iterdir()) == []


CHECKOUT = """\
# A comment that stays.
supported:
  megatron-core: ["0.15.0", "0.15.2", "0.16.0", "0.16.1", "0.17.0"]

patches:
  first:
    summary: the first one
    kind: compat
    changes: nothing
    distribution: megatron-core
    module: shim.patches.megatron_core.first
    variants:
      only:
        applies: {megatron-core: ">=0.15,<0.18"}
        targets: ["megatron.core.package_info:MAJOR"]
    delete_when: never
"""


@pytest.fixture
def checkout(fetch, tmp_path, monkeypatch):
    """A source checkout with one patch, and the command in it."""
    top = tmp_path / "checkout"
    for folder in ("patches/megatron_core", "tests/cells", "tests/pairs", "shim", "maintenance", "changes"):
        (top / folder).mkdir(parents=True)
    (top / "maintenance" / "commands.py").touch()  # that there is one makes it a checkout
    (top / "patches" / "megatron_core" / "first.py").touch()
    (top / "version_matrix.yaml").write_text(CHECKOUT)
    (top / "CHANGELOG.md").write_text("- Patch `first`.\n")
    write_pins(top / "version_matrix.yaml", fetch)
    monkeypatch.setattr("shim._matrix.load.PACKAGE", top / "shim")
    monkeypatch.setattr("shim._tools.fetching.fetched", fetch)
    return top


def test_the_entry_is_one_that_the_matrix_takes_and_the_checker_asks_to_fill(checkout, capsys):
    """With ranges that leave no gap and pins of every release; all else in the file is as it was."""
    assert main(["matrix"]) == 0
    assert main(["new-patch", "new-fix", "--target", TARGET]) == 0
    said = capsys.readouterr().out
    assert "body 3     0.17.0" in said and "--releases 0.17.0 -- -q tests/cells/test_new_fix.py" in said
    text = (checkout / "version_matrix.yaml").read_text()
    assert text.startswith(CHECKOUT)
    matrix = load_matrix(check_ranges=True)
    assert list(matrix.patches["new-fix"].variants) == ["v0_15_2", "v0_16_1"]
    assert {r: pin.variant for r, pin in matrix.known("new-fix")} == {
        **dict.fromkeys(("0.15.2", "0.16.0"), "v0_15_2"),
        **dict.fromkeys(("0.16.1", "0.17.0"), "v0_16_1"),
    }
    assert main(["matrix"]) == 1
    complained = capsys.readouterr().err.splitlines()
    assert len(complained) > 15 and all(line.startswith("shim: ") for line in complained)
    assert any(line.startswith("shim: patches/megatron_core/new_fix/__init__.py:1: ") for line in complained)
    asked = [line.partition(": ")[2].split(" ")[0] for line in complained if "new_fix/patch.yaml:" in line]
    assert len(asked) == 12 and asked.count("patches/megatron_core/new_fix/patch.yaml:5:") == 1
    # Else `shim pin --patch` would ask for them after all places are filled.
    new = matrix.patches["new-fix"]
    assert new.concerns and new.per_model and new.symptom
    assert any(line.startswith("shim: changes/new-fix.added.md:1: what goes right now") for line in complained)
    kinds = ("*matrix.yaml", "new_fix/*", "*new_fix.py", "new-fix.*.md")
    for file in (file for kind in kinds for file in checkout.rglob(kind)):
        file.write_text(file.read_text().replace(MARK, "filled"))
    assert main(["matrix"]) == 0
    news = checkout / "changes" / "new-fix.added.md"
    assert news.read_text().startswith("Patch `new-fix` for megatron-core 0.15.2 to 0.17.0: ")
    news.unlink()
    assert main(["matrix"]) == 1
    assert "shim: changes/new-fix.added.md: missing" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(checkout, capsys):
    before = sorted(checkout.rglob("*"))
    assert main(["new-patch", "new-fix", "--target", TARGET, "--dry-run"]) == 0
    assert sorted(checkout.rglob("*")) == before
    assert (checkout / "version_matrix.yaml").read_text() == CHECKOUT
    said = capsys.readouterr().out
    for shown in ("  new-fix:\n    v0_15_2:", "summary:", "def bindings(", "def new_fix(here: Here)"):
        assert shown in said


def test_a_file_that_is_there_is_kept(fetch):
    with pytest.raises(OptionError, match=r"frozen_recompute/__init__\.py is there already"):
        new_patch.write_patch(propose(fetch, id="frozen-recompute"), matrix_of(*RELEASES), REPOSITORY)


def test_json_has_what_was_found(fetch):
    found = json.loads(json.dumps(propose(fetch).to_dict()))
    assert found["bodies"][1]["releases"] == ["0.15.2", "0.16.0"] and found["bodies"][0]["fingerprints"] == []
    assert found["targets"] == [TARGET] and list(found["variants"]) == ["v0_15_2", "v0_16_1"]
