"""The command `shim`: what it prints, its JSON keys, and its exit codes 0 (fine), 1 (not met), 2 (wrong usage).

`audit`, locks and the cells of `matrix` have tests of their own: test_audit.py, test_lock.py, test_ci_cells.py.
"""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, PATCH, REPOSITORY, megatron, metadata, output_of, write_file

from shim import __version__
from shim._matrix.load import load_matrix, lock_path
from shim._tools.cli import main
from shim._tools.progress import Progress
from shim.testing.patience import patience

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


def test_plan_begins_with_a_headline_and_says_what_each_patch_does(shim):
    """Text for people: what it means first; why, and on which targets, under -v."""
    code, out, err = shim("plan")
    assert (code, err) == (0, "")
    assert out.startswith("2 patches apply; 0 not needed here, 0 problems\n")
    assert "\n  roll-fix: rolls stay inside their sequence\n" in out
    out = shim("plan", "-v")[1]
    assert "\n  patch           changes   what shim does\n  roll-fix        values    rolls stay " in out
    assert "variant old of megatron.core.roll:roll, megatron.core.roll:Layer.forward\n" in out
    assert "megatron-core 0.16.0 needs it; all 3 functions match a known release" in out
    assert "megatron-core 0.16.0 needs it; its function matches a known release" in out


def test_problems_come_first(shim, world):
    """With reason and remedy, which the others do without."""
    world.install(EDITED)
    out = shim("plan")[1]
    assert out.startswith("1 patch applies; 0 not needed here, 1 problem\n")
    assert out.index("Problems:\n  roll-fix") < out.index("To apply:\n  faster-forward: ")
    assert "their sequence (drifted)\n      megatron-core 0.16.0 differs at megatron.core.roll:roll" in out
    assert "\n      Remedy: let the proofs decide, in some minutes: shim pin --prove" in out


def test_what_is_right_and_what_is_left_out_stand_apart(shim, world):
    """Each group once; whoever excluded a patch is told what did."""
    world.install(FIXED, "0.18.0")
    out = shim("plan", "--exclude", "faster-forward")[1]
    assert out.startswith("0 patches apply; 1 left out, 1 not needed here, 0 problems\n")
    assert "roll-fix" not in out
    assert "Not needed, because this release has fixed the defect:\n  roll-fix" in shim("plan", "-v")[1]
    assert "Left out: excluded by argument or MEGATRON_SHIM_EXCLUDE (faster-forward)." in out


def test_features_are_not_mixed_with_fixes(shim, world):
    """They are bound, and do nothing until somebody switches them on."""
    world.pin(MATRIX.replace("kind: performance", "kind: feature"))
    world.install(BROKEN)
    out = shim("plan")[1]
    assert out.startswith("2 patches apply;")
    assert "To apply:\n  roll-fix: " in out and "without effect until you use them" in out
    assert out.index("until you use them") < out.index("faster-forward")


@pytest.mark.parametrize("command", ["plan", "status"])
def test_with_nothing_installed_there_is_nothing_to_patch(shim, world, command):
    """Which is said, with the Python that was asked, and is no success; machines get what they always get."""
    world.on_path(world.own)
    code, out, _ = shim(command)
    assert code == 1
    assert out.startswith("Neither megatron-core nor transformer-engine is installed for " + sys.executable)
    assert "Remedy: " in out and "roll-fix" not in out
    code, out, _ = shim(command, "--json")
    assert code == 1 and set(json.loads(out)["patches"]) == {"roll-fix", "faster-forward"}


def test_nothing_installed_is_not_locked(shim, world, tmp_path):
    """A job held to that would never start where megatron-core is."""
    world.on_path(world.own)
    code, out, err = shim("pin", "--lock", str(tmp_path / "shim.lock"))
    assert (code, out) == (1, "") and "No lock was written" in err
    assert not list(tmp_path.glob("*.lock"))


def test_a_report_before_the_imports_says_what_waits(shim, importable):
    """As a trainer prints it that applies as early as it can: nothing is wrong yet."""
    import shim as library

    with library.patched() as report:
        text = str(report)
    assert text.startswith("0 patches applied; 2 waiting for an import, 0 not needed here, 0 problems\n")
    assert "Waiting until their modules are imported:\n  roll-fix: rolls stay" in text


def test_list_says_what_there_is(shim, world):
    """Whatever is installed: all patches by kind, with their summaries and the releases that get them."""
    world.on_path(world.own)
    code, out, _ = shim("list")
    assert code == 0 and out.startswith("2 patches")
    assert "\ncorrectness:\n  roll-fix        rolls stay inside their sequence" in out
    found = json.loads(shim("list", "--json")[1])
    assert found["roll-fix"] == {
        "kind": "correctness",
        "summary": "rolls stay inside their sequence",
        "changes": "values",
        "distribution": "megatron-core",
        "releases": "0.16.0 to 0.17.0",
    }


def run_shim(world, *arguments, **streams):
    """The command in a process of its own, with the fake release."""
    paths = [str(world.site), str(world.own)]
    trust = "import shim._matrix.load as m; m.TRUSTED = (*m.TRUSTED, 'trainer_patches')"
    code = f"import sys; sys.path[:0] = {paths!r}; {trust}; from shim._tools.cli import main; sys.exit(main())"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MEGATRON_SHIM_MATRIX": str(world.matrix)}
    streams.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environ, **streams)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["plan"], 0), (["plan", "--require", "roll-fix"], 1), (["matrix", "--cells"], 0)],
)
def test_a_reader_that_has_gone_is_no_error(world, arguments, code):
    """As `shim plan | head -1` has it: no traceback, and the exit code is what it is."""
    world.install(EDITED)
    read, write = os.pipe()
    os.close(read)
    with run_shim(world, *arguments, stdout=write) as process:
        os.close(write)
        err = process.communicate(timeout=patience())[1].decode()
    assert process.returncode == code
    assert "Broken" not in err and "Traceback" not in err and "Exception" not in err
    assert not code or "required, but roll-fix is drifted" in err


def test_a_reader_of_both_streams_that_has_gone_changes_no_exit_code(world):
    """As `shim plan --only gone 2>&1 | head` has it."""
    read, write = os.pipe()
    os.close(read)
    with run_shim(world, "plan", "--only", "gone", stdout=write, stderr=write) as process:
        os.close(write)
        assert process.wait(patience()) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_and_no_success(world):
    """A lock or a report that was cut short must not look like one."""
    world.install(BROKEN)
    with open("/dev/full", "w") as full, run_shim(world, "plan", "--json", stdout=full) as process:
        err = process.communicate(timeout=patience())[1].decode()
    assert process.returncode == 1
    assert re.fullmatch(r"shim: standard output cannot be written: .*", err.splitlines()[-1])
    assert "Traceback" not in err


NOISY = """
import logging, sys, warnings
warnings.warn("apex is missing")
logging.getLogger("noise").warning("falls back")
print("hello")
"""


def test_status_keeps_upstream_quiet(shim, world):
    """What it prints, logs and warns about at import tells nothing of shim, and would break JSON; -v lets it speak."""
    (world.site / "megatron/core/__init__.py").write_text(NOISY)
    code, out, err = shim("status")
    assert (code, err) == (0, "") and out.startswith("2 patches applied; 0 not needed here, 0 problems\n")


def test_status_lets_upstream_speak_under_v(shim, world):
    """To standard error and output, as it does anywhere."""
    (world.site / "megatron/core/__init__.py").write_text(NOISY)
    with pytest.warns(UserWarning, match="apex is missing"):
        code, out, _ = shim("status", "-v")
    assert code == 0 and "hello" in out


def test_what_shim_itself_warns_of_is_not_hushed(shim, world, monkeypatch):
    """It is about this process, whoever imported what."""
    write_file(world.site / "megatron/core/__init__.py", "import logging; logging.getLogger('shim').warning('look')")
    assert "look" in shim("status")[2]


def test_progress_overwrites_itself_on_a_terminal_only():
    """A log gets lines, and only where it would be silent for long."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, log, slow = Terminal(), io.StringIO(), io.StringIO()
    for stream, seconds in ((terminal, 60), (log, 60), (slow, 0)):
        progress = Progress(stream, seconds)
        progress("a long one")
        progress("short")
        progress.done()
    assert terminal.getvalue() == "\ra long one\rshort     \r     \r"
    assert (log.getvalue(), slow.getvalue()) == ("", "a long one\nshort\n")


def test_plan_as_json_has_the_documented_keys(shim):
    """For machines."""
    code, out, _ = shim("plan", "--json")
    found = json.loads(out)
    keys = {"digest", "environment", "patches", "wrong_pairs", "pair_is_known", "lost_features", "notes"}
    assert code == 0 and set(found) == keys
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


def test_the_command_alone_says_what_it_can_do(shim):
    """Which is still wrong usage, but what one types first."""
    code, out, err = shim()
    assert (code, out) == (2, "")
    assert "usage: shim" in err and "Begin with `shim plan`" in err and "print all patches" in err


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
    keys = {"kind", "state", "reason", "variant", "targets", "remedy", "summary", "holds", "others"}
    keys |= {"symptom", "changes", "concerns", "not_known", "in_part"}
    assert set(found["patches"]["roll-fix"]) == keys
    assert found["patches"]["roll-fix"]["targets"]["megatron.core.roll:roll"] == "bound"
    roll = sys.modules["megatron.core.roll"].roll
    assert roll.__code__.co_filename.endswith("roll.py") and "trainer_patches" not in roll.__code__.co_filename


def test_status_exits_with_1_where_something_is_amiss(shim, world, importable):
    """A correctness patch that has drifted, for one; the fake package that cannot be imported, for another."""
    world.install(EDITED)
    (world.site / "megatron/core/__init__.py").write_text("")
    code, out, _ = shim("status")
    assert code == 1 and "Problems:\n  roll-fix" in out


def test_status_survives_a_package_that_cannot_be_imported(shim):
    """The fake megatron.core raises RuntimeError; upstream does the like without a GPU."""
    code, out, err = shim("status", "--json")
    assert code == 1
    assert json.loads(out)["patches"]["roll-fix"]["state"] == "pending"
    out = shim("status")[1]
    assert "2 problems" in out and "cannot be imported here:\n  roll-fix" in out and "waits for" not in out
    assert "megatron.core.roll cannot be imported here: RuntimeError: megatron.core was imported" in err


def test_explain_says_what_for_and_why(shim):
    """Header of the patch file, decision, ranges, targets, and when to delete it."""
    code, out, _ = shim("explain", "roll-fix", "-v")
    assert code == 0
    short = shim("explain", "roll-fix")[1]
    assert "MEGATRON_SHIM_EXCLUDE=roll-fix" in short and "What is wrong" not in short and "binds megatron" not in short
    for part in ("rolls stay inside", "What is wrong: rolls.", "Here: apply", "binds megatron.core.roll:roll"):
        assert part in out
    for part in ("relies on megatron.core.roll:helper", "Delete when: ", "upstream has fixed it (fixed in 0.18)"):
        assert part in out


def test_explain_as_json(shim):
    """The text, and what the plan says of the patch."""
    found = json.loads(shim("explain", "faster-forward", "--json")[1])
    assert found["id"] == "faster-forward" and found["action"] == "apply" and found["options"] == {"pages": 4}
    assert "Option pages=4: an integer" in found["text"]


DOCTOR_KEYS = {
    "shim",
    "python",
    "installed",
    "variables",
    "machine",
    "packages",
    "others",
    "import_hooks",
    "digest",
    "plan",
    "notes",
    "problems",
    "lost_features",
}


def test_doctor_as_json(shim, world):
    """Where shim itself was imported from comes first: a second copy is a frequent cause of riddles."""
    write_file(world.site / "torch/__init__.py", "")
    metadata(world.site, "2.9.1", "torch")
    code, out, _ = shim("doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == []
    assert set(found) == DOCTOR_KEYS
    assert found["shim"] == {
        "version": __version__,
        "location": str(REPOSITORY / "shim"),
        "matrix": str(world.matrix),
        "matrix_content": load_matrix(world.matrix).content,
    }
    assert found["variables"]["MEGATRON_SHIM_MATRIX"] == str(world.matrix)
    assert found["plan"]["roll-fix"]["action"] == "apply"


def test_doctor_is_markdown_to_paste(shim, world, monkeypatch):
    """A heading, and lists."""
    write_file(world.site / "megatron_core-1.dist-info/METADATA", "Name: megatron-core\nVersion: a|b\n")
    code, out, _ = shim("doctor")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "### shim doctor"
    assert f"- shim {__version__} from `{REPOSITORY / 'shim'}`" in lines
    assert "- transformer-engine: not installed" in lines
    assert lines[lines.index("Patches:") + 1].startswith("- roll-fix: ")
    assert "Problems:" in lines and "'a|b' is not a PEP 440 version" in out


def test_doctor_reports_instead_of_failing(shim, monkeypatch):
    """It is what one runs when nothing works."""
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", "/gone.yaml")
    code, out, _ = shim("doctor", "--json")
    assert code == 1
    assert any("/gone.yaml:1: cannot be read" in problem for problem in json.loads(out)["problems"])


def test_matrix_prints_which_release_gets_which_variant(shim):
    """Checked in full, gaps and overlaps included."""
    code, out, _ = shim("matrix")
    assert code == 0 and "\n  roll-fix        old: 0.16.0; new: 0.17.0; upstream: 0.18.0\n" in out
    assert json.loads(shim("matrix", "--json")[1])["megatron-core"]["0.17.0"]["roll-fix"] == "new"


@pytest.fixture
def fetched(world, monkeypatch):
    """`shim pin` finds the fake releases instead of downloading real ones."""
    monkeypatch.setattr("shim.testing.releases.fetch", lambda release, *_: world.root / "releases" / release)


def test_pin_writes_what_it_measures(shim, world, fetched):
    """And says whether that changed anything."""
    code, out, err = shim("pin", "--releases", "--json")
    releases = {"megatron-core": ["0.16.0", "0.17.0", "0.18.0"]}
    told = {"releases": releases, "not_at_hand": []}
    assert (code, json.loads(out)) == (0, {"changed": False, "matrix": str(world.matrix), **told})
    assert f"fetches those of 3 releases that the cache lacks, and rewrites the pins of {world.matrix}" in err
    assert shim("pin", "--check", "--json")[:1] == (0,)
    write_file(world.root / "releases/0.17.0/megatron/core/roll.py", EDITED)
    code, out, _ = shim("pin", "--check", "--json")
    assert (code, json.loads(out)) == (1, {"stale": True, **told})
    assert json.loads(shim("pin", "--releases", "--json")[1])["changed"] is True
    assert shim("pin", "--check", "--package", "trainer_patches")[1] == "pins are current\n"


def test_matrix_says_where_pins_are_stale(shim, world, fetched):
    """Every patch would drift there; exit 1, so that a script sees it."""
    code, out, err = shim("matrix")
    assert (code, err) == (0, "") and "roll-fix" in out
    text = world.matrix.read_text()
    world.matrix.write_text(text.replace('"0.17.0", ', '"0.17.0", "0.17.1", ', 1))
    code, out, err = shim("matrix")
    assert code == 1 and "roll-fix" in out
    assert err.splitlines() == [
        "shim: megatron-core 0.17.1 lacks a pin of roll-fix, variant new",
        "shim: megatron-core 0.17.1 lacks a pin of faster-forward, variant only",
        f"shim: Remedy: run shim pin --releases --matrix {world.matrix}.",
    ]
    world.matrix.write_text(text)
    lock_path(world.matrix).unlink()
    code, _, err = shim("matrix")
    assert code == 1 and err.startswith("shim: the matrix has no pins\nshim: Remedy: run shim pin --releases")


@pytest.fixture
def shipped(world, fetched, monkeypatch):
    """The matrix of the fake world is the one that ships, with a fake Transformer Engine in it, and a list of names
    beside it."""
    megatron(world.root / "releases/0.18.0", "0.18.0", {"te.py": "from transformer_engine.pytorch import Linear\n"})
    write_file(world.root / "releases/2.1.0/transformer_engine/pytorch/__init__.py", "class Linear: pass\n")
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: world.matrix)
    monkeypatch.setattr("shim._matrix.load._module_exists", lambda module, shipped: True)
    monkeypatch.setattr("shim._te.names.FILE", world.root / "wanted_names.json")
    monkeypatch.setattr("shim._releases.known_files.FILE", world.root / "known_files.json")
    monkeypatch.setattr("shim._matrix.compiled.FILE", world.root / "matrix.json")
    monkeypatch.setattr("shim._te.tables.FILE", world.root / "lost_names.json")
    monkeypatch.setattr("shim.maintenance.pin_all.MORE_TE", ())
    (world.root / "lost_names.json").write_text("{}\n")
    (world.root / "wanted_names.json").write_text("{}\n")
    (world.root / "known_files.json").write_text("{}\n")
    (world.root / "matrix.json").write_text("{}\n")
    world.pin(MATRIX.replace("\n\npatches", '\n  transformer-engine: ["2.1.0"]\n\npatches', 1))
    return world.root / "wanted_names.json"


def test_pin_of_the_shipped_matrix_writes_the_wanted_names_too(shim, world, shipped):
    """They come from the same wheels; what `shim audit` says of a Transformer Engine rests on them."""
    code, out, _ = shim("pin", "--check", "--json")
    assert (code, json.loads(out)["stale"]) == (1, True)
    assert json.loads(shim("pin", "--releases", "--json")[1])["changed"] is True
    name = "transformer_engine.pytorch:Linear"
    assert json.loads(shipped.read_text()) == {name: {"wanted_by": ["0.18.0"], "in": ["2.1.0"]}}
    lost = json.loads(shipped.with_name("lost_names.json").read_text())
    assert (lost["transformer-engine"], lost["losses"]) == (["2.1.0"], [])
    assert shim("pin", "--check")[0] == 0
    assert json.loads(shim("pin", "--releases", "--json")[1])["changed"] is False


def test_pin_of_another_matrix_leaves_the_wanted_names_alone(shim, world, fetched, tmp_path, monkeypatch):
    """They belong to the releases of the shipped one."""
    monkeypatch.setattr("shim._te.names.FILE", tmp_path / "gone.json")
    assert shim("pin", "--releases")[0] == 0
    assert not (tmp_path / "gone.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["pin", "--releases"],
        ["pin", "--check"],
        ["pin", "--add", "0.99.0"],
        ["pin", "--patch", "roll-fix"],
        ["new-patch", "new-fix", "--target", "a:b"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_installed_shim_says_that_a_command_needs_a_checkout(shim, world, fetched, monkeypatch, command):
    """In one sentence with the remedy. The matrix is what was tested, and stays; the rest of the commands run."""
    monkeypatch.setattr("shim._matrix.load.PACKAGE", world.matrix.parent)
    before = world.matrix.read_bytes()
    code, out, err = shim(*command)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    said = f"shim {' '.join(command[:2])}" if command[0] == "pin" else "shim new-patch"
    assert f"shim: {said} is for developers of shim and needs a source checkout" in err
    assert "is an installed shim. Remedy: clone shim's repository" in err
    assert world.matrix.read_bytes() == before and shim("matrix")[0] == 0


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
    code, _, err = shim("pin", "--releases")
    assert code == 1 and "cannot be fetched: could not download" in err


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
        (["pin"], "name an option"),
        (["pin", "--lock", "x", "--releases"], "leave out --releases"),
        (["pin", "--prove"], "--prove belongs to --lock"),
        (["pin", "--lock", "x", "--append"], "belong to --prove"),
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
    code = f"import sys; sys.path[:0] = {paths!r}; from shim._tools.doctor import examine; print(examine()['problems'])"
    assert "does not notice `shim run`" in output_of(code, flags=(flag,))
    assert "does not notice" not in output_of(code)
