"""`shim diff`: what is new, gone or changed between two locks, or a lock and what is installed, by what it changes."""

import json
from pathlib import Path

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, PATCH, REWORKED, write_file

from shim._matrix.load import load_matrix
from shim._planning.lock import locked, write_lock
from shim._tools.cli import main
from shim._tools.diff import compare

MODULE = "trainer_patches/roll_fix.py"


@pytest.fixture
def diff(world, monkeypatch, capsys, tmp_path):
    """Run `shim diff OLD ...` in a world whose lock is OLD; returns exit code, standard output and standard error."""
    write_file(world.own / MODULE, PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.install(BROKEN)
    write_lock(tmp_path / "old.lock", world.plan())
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["diff", "old.lock", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_same_is_no_difference(diff, world):
    """With exit code 0, against the installed release and against a lock."""
    assert diff() == (0, "no difference between old.lock and what is installed\n", "")
    write_lock("new.lock", world.plan())
    code, out, _ = diff("new.lock", "--json")
    found = json.loads(out)
    assert code == 0 and not found["differs"] and found["patches"] == {} and found["releases"] == {}


def test_the_words_of_the_lock_count_unless_others_are_named(diff, world, tmp_path):
    """Else every patch that they leave out would be new."""
    world.pin(MATRIX.replace("    changes: values", "    changes: values\n    concerns: [mla]"))
    world.install(BROKEN)
    write_lock(tmp_path / "old.lock", world.plan(concerns="moe"))
    assert json.loads((tmp_path / "old.lock").read_text())["concerns"] == ["moe"]
    assert diff()[:2] == (0, "no difference between old.lock and what is installed\n")
    assert "new     roll-fix" in diff("--concerns", "moe,mla")[1]


def test_another_release_shows_what_is_gone_and_why(diff, world):
    """The reason is that of the plan, if there is one."""
    world.install(FIXED, "0.18.0")
    code, out, _ = diff()
    assert code == 1
    assert out.startswith(
        "0 new, 1 gone, 0 changed, from old.lock to what is installed\n  megatron-core 0.16.0 -> 0.18.0\n"
    )
    assert "\nThey change values, such as a loss or a gradient:\n  gone    roll-fix: upstream: " in out
    assert "\n      rolls stay inside their sequence\n" in out
    write_lock("new.lock", world.plan())
    assert "gone    roll-fix: no longer applied\n" in diff("new.lock")[1]


def test_variants_options_and_bodies_are_told(diff, world):
    world.install(REWORKED, "0.17.0")
    code, out, _ = diff("--options", '{"faster-forward": {"pages": 8}}', "--json")
    found = json.loads(out)
    assert code == 1 and found["releases"] == {"megatron-core": ["0.16.0", "0.17.0"]}
    roll, forward = found["patches"]["roll-fix"], found["patches"]["faster-forward"]
    assert (
        roll["how"] == "changed" and roll["what"][0] == "variant old -> new" and roll["what"][1].endswith(" upstream's")
    )
    assert (roll["changes"], roll["own_code"]) == ("values", False)
    assert forward["what"][0] == "option pages 4 -> 8"
    assert "The same on other bodies of upstream's: 1 (faster-forward)\n" in diff()[1]


def test_new_patches_come_first(diff, world):
    """And a patch that this shim does not have is named as such."""
    write_lock("all.lock", world.plan())
    write_lock("old.lock", world.plan(only=["faster-forward"]))
    assert "new     roll-fix: variant old\n" in diff()[1]
    content = json.loads(Path("all.lock").read_text())
    content["patches"]["gone-for-good"] = content["patches"].pop("roll-fix")
    Path("old.lock").write_text(json.dumps(content))
    code, out, _ = diff()
    assert code == 1 and out.startswith("1 new, 1 gone, 0 changed")
    assert "\nThis shim has no such patch:\n  gone    gone-for-good: no longer applied\n" in out


def test_other_code_of_a_patch_is_told(diff, world):
    write_file(world.own / MODULE, PATCH + "    # changed\n")
    code, out, _ = diff()
    assert code == 1 and out.startswith("0 new, 0 gone, 2 changed, ")  # one module
    assert "  changed roll-fix: other code\n" in out


def test_all_else_that_a_lock_holds_is_compared(diff, world):
    """The last two are foreign text, which begins no line of its own."""
    new = locked(world.plan())
    old = {
        **new,
        "code": {**new["code"], "_engine": "0" * 16},
        "drifted": ["x-fix"],
        "kinds": ["compat"],
        "matrix": "other",
        "packages": {"p\nforged": "0"},
        "releases": {**new["releases"], "torch": "2.6\nforged"},
    }
    matrix = load_matrix(world.matrix)
    found = compare(old, new, matrix)
    assert found.shim_code == ["_engine"] and found.kinds[0] == ["compat"] and found.matrix[0] == "other"
    assert found.drifted == {"x-fix": "gone"} and compare(new, old, matrix).drifted == {"x-fix": "new"}
    write_lock("all.lock", world.plan())
    Path("old.lock").write_text(json.dumps(old))
    out = diff("all.lock")[1]
    for line in ("  code of shim: _engine", "  x-fix has no longer drifted", "  torch 2.6 forged -> none"):
        assert f"{line}\n" in out
    assert "\nforged" not in out and "kinds compat -> correctness compat performance feature\n" in out


@pytest.mark.parametrize("part", ["code", "drifted", "kinds", "matrix", "packages", "releases", "digest"])
def test_no_part_of_a_lock_is_overlooked(world, part):
    write_file(world.own / MODULE, PATCH)
    world.install(BROKEN)
    new, matrix = locked(world.plan()), load_matrix(world.matrix)
    other = {"code": {}, "drifted": ["a"], "kinds": [], "packages": {"a": "b"}, "releases": {}}.get(part, "other")
    assert not compare(new, new, matrix) and compare({**new, part: other}, new, matrix)
    patch = new["patches"]["roll-fix"]
    for name in patch:
        changed = {**patch, name: {"x": "y"} if isinstance(patch[name], dict) else "other"}
        assert compare({**new, "patches": {**new["patches"], "roll-fix": changed}}, new, matrix), name


def test_of_several_trees_the_one_like_the_other_side_is_compared(diff, world):
    """And the text says how many are not."""
    first = world.plan()
    world.install(REWORKED, "0.17.0")
    write_lock("old.lock", first, also=[locked(world.plan())])
    assert diff()[0] == 0
    write_lock("new.lock", world.plan())
    assert diff("new.lock")[0] == 0
    world.install(FIXED, "0.18.0")
    assert "  not compared: 1 further tree of the locks\n" in diff()[1]


def test_what_cannot_be_compared_is_refused(diff, world):
    assert main(["diff", "none.lock"]) == 2
    write_lock("new.lock", world.plan())
    code, _, err = diff("new.lock", "--exclude", "roll-fix")
    assert code == 2 and "--exclude chooses" in err
    world.on_path(world.own)
    code, _, err = diff()
    assert code == 1 and "Neither megatron-core nor" in err and "Or name a second lock." in err
