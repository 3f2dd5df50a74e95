"""The command `shim`: what it prints, its JSON keys, and its exit codes 0 (fine), 1 (not met), 2 (wrong usage).

`audit`, locks and the cells of `matrix` have tests of their own: test_audit.py, test_lock.py, test_ci_cells.py.
"""

import json
import re
import sys

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, PATCH, REPOSITORY, megatron, output_of, write_file

from shim import __version__
from shim._cli import main

EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")


@pytest.fixture
def shim(world, capsys, monkeypatch):
    """Run a command on the fake world; returns exit code, standard output and standard error."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.install(BROKEN)

    def run(*arguments):
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def importable(world):
    """The fake megatron.core can be imported."""
    (world.site / "megatron/core/__init__.py").write_text("")


def test_plan_prints_a_line_per_patch(shim):
    """Text for people."""
    code, out, err = shim("plan")
    assert (code, err) == (0, "")
    assert "apply         roll-fix [old]: megatron-core 0.16.0 needs it" in out


def test_plan_as_json_has_the_documented_keys(shim):
    """For machines."""
    code, out, _ = shim("plan", "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"digest", "environment", "patches", "pair_is_known", "lost_features"}
    assert found["patches"]["roll-fix"]["action"] == "apply"


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["--require", "roll-fix"], BROKEN, 0),
        (["--require", "roll-fix"], FIXED, 0),
        (["--require", "roll-fix,faster-forward", "--strict", "--on-drift", "error"], BROKEN, 0),
        ([], EDITED, 0),
        (["--require", "roll-fix"], EDITED, 1),
        (["--strict"], EDITED, 1),
        (["--on-drift", "error"], EDITED, 1),
        (["--strict", "--exclude", "roll-fix"], EDITED, 0),
        (["--strict", "--only", "faster-forward"], EDITED, 0),
        (["--require", "roll-fix", "--on-drift", "apply"], EDITED, 0),
    ],
)
def test_plan_exits_with_1_where_something_asked_for_is_not_met(shim, world, arguments, text, code):
    """The plan is printed all the same, and the reason goes to standard error."""
    world.install(text)
    found, out, err = shim("plan", "--json", *arguments)
    assert found == code
    assert json.loads(out)["patches"]
    assert bool(err) == bool(code)
    assert not err or re.match(r"shim: .*roll-fix is drifted.*Remedy: ", err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--only", "gone"],
        ["plan", "--matrix", "/gone.yaml"],
        ["explain", "gone"],
        ["matrix", "--matrix", "/gone.yaml"],
        ["status", "--exclude", "gone"],
        ["status", "--lock", "/gone.lock"],
        ["pin", "--lock", "/gone/shim.lock"],
        ["audit", "/gone"],
        ["audit", "numpy==1.0"],
        ["matrix", "--cells", "--range", ">=x"],
        ["run"],
    ],
)
def test_what_cannot_be_understood_exits_with_2(shim, arguments):
    """Unknown ids and invalid matrices; one line on standard error, nothing on standard output."""
    code, out, err = shim(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"shim: [^\n]+\n", err)


@pytest.mark.parametrize(
    "arguments", [[], ["gone"], ["plan", "--gone"], ["explain"], ["audit"], ["plan", "--on-drift", "raise"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    """argparse says how it is used."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: shim" in capsys.readouterr().err


def test_a_bad_variable_is_wrong_usage(shim, monkeypatch):
    """As a bad argument is."""
    monkeypatch.setenv("MEGATRON_SHIM_ON_DRIFT", "raise")
    assert shim("plan")[0] == 2


def test_version(capsys):
    """Of shim itself."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron-shim {__version__}\n"


def test_status_applies_reads_back_and_reverts(shim, importable):
    """What a trainer started here would get; the process is as before afterwards."""
    code, out, _ = shim("status", "--json")
    found = json.loads(out)
    assert code == 0, out
    assert set(found) == {"summary", "digest", "releases", "applied", "patches", "lost"}
    assert found["applied"] == ["roll-fix", "faster-forward"]
    assert set(found["patches"]["roll-fix"]) == {"kind", "state", "reason", "variant", "targets", "remedy"}
    assert found["patches"]["roll-fix"]["targets"]["megatron.core.roll:roll"] == "bound"
    roll = sys.modules["megatron.core.roll"].roll
    assert roll.__code__.co_filename.endswith("roll.py") and "trainer_patches" not in roll.__code__.co_filename


def test_status_exits_with_1_where_something_is_amiss(shim, world, importable):
    """A correctness patch that has drifted, for one; the fake package that cannot be imported, for another."""
    world.install(EDITED)
    (world.site / "megatron/core/__init__.py").write_text("")
    code, out, _ = shim("status")
    assert code == 1 and "drifted       roll-fix" in out


def test_status_survives_a_package_that_cannot_be_imported(shim):
    """The fake megatron.core raises RuntimeError; upstream does the like without a GPU."""
    code, out, err = shim("status", "--json")
    assert code == 1
    assert json.loads(out)["patches"]["roll-fix"]["state"] == "pending"
    assert "megatron.core.roll cannot be imported here: RuntimeError: megatron.core was imported" in err


def test_explain_says_what_for_and_why(shim):
    """Header of the patch file, decision, ranges, targets, and when to delete it."""
    code, out, _ = shim("explain", "roll-fix")
    assert code == 0
    for part in ("rolls stay inside", "What is wrong: rolls.", "Here: apply", "binds megatron.core.roll:roll"):
        assert part in out
    for part in ("relies on megatron.core.roll:helper", "Delete when: ", "upstream has it (mended in 0.18)"):
        assert part in out


def test_explain_as_json(shim):
    """The text, and what the plan says of the patch."""
    found = json.loads(shim("explain", "faster-forward", "--json")[1])
    assert found["id"] == "faster-forward" and found["action"] == "apply" and found["options"] == {"pages": 4}
    assert "Options: pages=4" in found["text"]


DOCTOR_KEYS = {
    "shim",
    "python",
    "installed",
    "variables",
    "import_hooks",
    "digest",
    "plan",
    "notes",
    "problems",
    "lost_features",
}


def test_doctor_as_json(shim, world):
    """Where shim itself was imported from comes first: a second copy is a frequent cause of riddles."""
    code, out, _ = shim("doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == []
    assert set(found) == DOCTOR_KEYS
    assert found["shim"] == {
        "version": __version__,
        "location": str(REPOSITORY / "shim"),
        "matrix": str(world.matrix),
    }
    assert found["variables"]["MEGATRON_SHIM_MATRIX"] == str(world.matrix)
    assert found["plan"]["roll-fix"]["action"] == "apply"


def test_doctor_is_markdown_to_paste(shim, world, monkeypatch):
    """A heading, lists, and a table that no reason can break."""
    write_file(world.site / "megatron_core-1.dist-info/METADATA", "Name: megatron-core\nVersion: a|b\n")
    code, out, _ = shim("doctor")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "### shim doctor"
    assert f"- shim {__version__} from `{REPOSITORY / 'shim'}`" in lines
    assert "- transformer-engine: not installed" in lines
    table = lines[lines.index("| patch | action | variant | reason |") + 2 :][:2]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in table), table
    assert "Problems:" in lines and "'a|b' is not a PEP 440 version" in out


def test_doctor_reports_instead_of_failing(shim, monkeypatch):
    """It is what one runs when nothing works."""
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", "/gone.yaml")
    code, out, _ = shim("doctor", "--json")
    assert code == 1
    assert any("/gone.yaml:1: cannot be read" in problem for problem in json.loads(out)["problems"])


def test_matrix_prints_the_table_of_support(shim):
    """Checked in full, gaps and overlaps included."""
    code, out, _ = shim("matrix")
    assert code == 0 and out.splitlines()[0] == "| megatron-core | 0.16.0 | 0.17.0 | 0.18.0 |"
    assert json.loads(shim("matrix", "--json")[1])["megatron-core"]["0.17.0"]["roll-fix"] == "new"


@pytest.fixture
def fetched(world, monkeypatch):
    """`shim pin` finds the fake releases instead of downloading real ones."""
    monkeypatch.setattr("shim.testing.releases.fetch", lambda release, *_: world.root / "releases" / release)


def test_pin_writes_what_it_measures(shim, world, fetched):
    """And says whether that changed anything."""
    code, out, err = shim("pin", "--json")
    releases = {"megatron-core": ["0.16.0", "0.17.0", "0.18.0"]}
    assert (code, json.loads(out)) == (0, {"changed": False, "matrix": str(world.matrix), "releases": releases})
    assert "megatron-core 0.17.0" in err
    assert shim("pin", "--check", "--json")[:1] == (0,)
    write_file(world.root / "releases/0.17.0/megatron/core/roll.py", EDITED)
    code, out, _ = shim("pin", "--check", "--json")
    assert (code, json.loads(out)) == (1, {"stale": True, "releases": releases})
    assert json.loads(shim("pin", "--json")[1])["changed"] is True
    assert shim("pin", "--check")[1] == "pins are current\n"


@pytest.fixture
def shipped(world, fetched, monkeypatch):
    """The matrix of the fake world is the one that ships, with a fake Transformer Engine in it, and a list of names
    beside it."""
    megatron(world.root / "releases/0.18.0", "0.18.0", {"te.py": "from transformer_engine.pytorch import Linear\n"})
    write_file(world.root / "releases/2.1.0/transformer_engine/pytorch/__init__.py", "class Linear: pass\n")
    monkeypatch.setattr("shim._matrix.matrix_path", lambda: world.matrix)
    monkeypatch.setattr("shim._matrix._module_exists", lambda module, shipped: True)
    monkeypatch.setattr("shim._wanted.FILE", world.root / "wanted_names.json")
    monkeypatch.setattr("shim._features.FILE", world.root / "lost_names.json")
    monkeypatch.setattr("shim._losses.MORE_ENGINES", ())
    (world.root / "lost_names.json").write_text("{}\n")
    (world.root / "wanted_names.json").write_text("{}\n")
    world.pin(MATRIX.replace("\n\npatches", '\n  transformer-engine: ["2.1.0"]\n\npatches', 1))
    return world.root / "wanted_names.json"


def test_pin_of_the_shipped_matrix_writes_the_wanted_names_too(shim, world, shipped):
    """They come from the same wheels; what `shim audit` says of a Transformer Engine rests on them."""
    code, out, _ = shim("pin", "--check", "--json")
    assert (code, json.loads(out)["stale"]) == (1, True)
    assert json.loads(shim("pin", "--json")[1])["changed"] is True
    name = "transformer_engine.pytorch:Linear"
    assert json.loads(shipped.read_text()) == {name: {"wanted_by": ["0.18.0"], "in": ["2.1.0"]}}
    lost = json.loads(shipped.with_name("lost_names.json").read_text())
    assert (lost["transformer-engine"], lost["losses"]) == (["2.1.0"], [])
    assert shim("pin", "--check")[0] == 0
    assert json.loads(shim("pin", "--json")[1])["changed"] is False


def test_pin_of_another_matrix_leaves_the_wanted_names_alone(shim, world, fetched, tmp_path, monkeypatch):
    """They belong to the releases of the shipped one."""
    monkeypatch.setattr("shim._wanted.FILE", tmp_path / "gone.json")
    assert shim("pin")[0] == 0
    assert not (tmp_path / "gone.json").exists()


def test_status_is_held_to_a_lock(shim, world, importable, tmp_path):
    """As apply() is."""
    assert shim("pin", "--lock", str(tmp_path / "shim.lock"))[0] == 0
    assert shim("status", "--lock", str(tmp_path / "shim.lock"))[0] == 0
    world.install(BROKEN, "0.16.1")
    (world.site / "megatron/core/__init__.py").write_text("")
    code, out, err = shim("status", "--lock", str(tmp_path / "shim.lock"))
    assert (code, out) == (1, "") and "0.16.0 in the lock, 0.16.1 here" in err


def test_a_release_that_cannot_be_fetched_is_not_met(shim, monkeypatch):
    """Offline, for one; pip's words are passed on."""
    from shim.testing.releases import FetchError

    def fetch(release, distribution, progress):
        raise FetchError("could not download")

    monkeypatch.setattr("shim.testing.releases.fetch", fetch)
    code, _, err = shim("pin")
    assert code == 1 and "shim: could not download" in err


def test_python_m_shim_is_the_command():
    """For source trees, which have no console script."""
    said = output_of("import runpy, sys; sys.argv = ['shim', '--version']; runpy.run_module('shim', {}, '__main__')")
    assert said == f"megatron-shim {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pin", "--lock", ""], "--lock is empty"),
        (["plan", "--lock", ""], "--lock is empty"),
        (["pin", "--only", "roll-fix"], "a selection belongs to --lock"),
        (["matrix", "--pairs"], "belong to --cells or --github"),
        (["matrix", "--range", ">=0.16"], "belong to --cells or --github"),
    ],
)
def test_options_that_would_have_no_effect_are_wrong_usage(shim, arguments, said):
    """Also what an unset variable of a script leaves behind."""
    code, out, err = shim(*arguments)
    assert (code, out) == (2, "") and said in err


def test_a_lock_can_be_of_a_selection(shim, tmp_path):
    """As the trainer applies it."""
    lock = str(tmp_path / "shim.lock")
    assert shim("pin", "--lock", lock, "--exclude", "roll-fix")[0] == 0
    assert "roll-fix" not in json.loads((tmp_path / "shim.lock").read_text())["patches"]
    assert shim("plan", "--lock", lock, "--exclude", "roll-fix")[0] == 0
    code, _, err = shim("plan", "--lock", lock)
    assert code == 1 and "roll-fix: not applied in the lock, applied" in err


@pytest.mark.parametrize("flag", ["-E", "-I"])
def test_doctor_says_what_a_python_does_not_notice(flag):
    """`shim run` cannot reach it, and whoever wonders why asks the doctor."""
    paths = [str(REPOSITORY), *(path for path in sys.path if "site-packages" in path)]
    code = f"import sys; sys.path[:0] = {paths!r}; from shim._doctor import examine; print(examine()['problems'])"
    assert "does not notice `shim run`" in output_of(code, flags=(flag,))
    assert "does not notice" not in output_of(code)
