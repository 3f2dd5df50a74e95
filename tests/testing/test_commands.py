"""Every command of the CLI with the shipped matrix on real releases: what tests on matrices of their own cannot see.

One process for each set of releases runs all commands but `run` in turn, as text and as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shim._tools.cli import _parser
from shim.testing import EVERYDAY, EVERYDAY_PAIRS, RELEASES, TE_RELEASES, cache_dir, environment, fetch

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds

# Runs command lines given as JSON; prints [command, exit code, standard output, standard error] for each.
DRIVER = """
import contextlib, io, json, sys
from shim._tools.cli import main

done = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    done.append([arguments, code, out.getvalue(), err.getvalue()])
print(json.dumps({"done": done, "torch": "torch" in sys.modules}))
"""
# Below `shim run`: prints the digest that its first import has applied, and text and JSON of `status` with exit codes.
STATUS = """
import contextlib, io, json
import megatron.core, shim
from shim._tools.cli import main

report = shim.status()
done = [[report.digest if report.applied else "", 0]]
for arguments in (["status"], ["status", "--json"]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    done.append([out.getvalue(), code])
print(json.dumps(done))
"""
COMMANDS = {
    "list": [[]],
    "plan": [["--require", "mtp-packed-sequences", "--strict", "--on-drift", "error"]],
    "explain": [["te-moved-symbols"]],
    "doctor": [[]],
    "matrix": [[], ["--cells", "--pairs", "--range", ">=0.19"]],
}


def known(command):
    [actions] = [action for action in _parser()._actions if getattr(action, "choices", None)]
    return command in actions.choices


def run_all(commands, directories):
    """The results of the command lines, each twice, as text and with --json."""
    both = [[*arguments, *flag] for arguments in commands for flag in ([], ["--json"])]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(both),
        capture_output=True,
        text=True,
        env=environment([*directories, REPOSITORY]),
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for arguments, _, out, _ in found["done"]:
        assert out, arguments
        if "--json" in arguments:
            json.loads(out)
    return found


def releases(cell):
    core, _, engine = cell.partition("+")
    named = [("megatron-core", core)] if core else []
    named += [("transformer-engine", engine)] if engine else []
    return {f"{name}=={release}": fetch(release, name) for name, release in named}


# Every set of bodies that differ; with SHIM_TEST_EVERY_RELEASE=1 every supported release of both.
EVERY = [*RELEASES, *(f"{RELEASES[-1]}+{engine}" for engine in TE_RELEASES)]
CELLS = EVERY if os.environ.get("SHIM_TEST_EVERY_RELEASE") == "1" else [*EVERYDAY, *EVERYDAY_PAIRS]


BY_PLACE = {"0.12.0", EVERYDAY_PAIRS[-1]}  # audited as directories, too


@pytest.mark.parametrize("cell", CELLS)
def test_every_command_that_imports_nothing(cell, tmp_path):
    """On releases as they were published: nothing on standard error, no torch, and exit code 0; but 1 of an audit of a
    Transformer Engine that has just lost a name."""
    found = releases(cell)
    lock = str(tmp_path / "shim.lock")
    commands = [[command, *more] for command, ways in COMMANDS.items() if known(command) for more in ways]
    commands += [["pin", "--lock", lock], ["plan", "--lock", lock]]
    commands += [["audit", target] for target in (*found, *(map(str, found.values()) if cell in BY_PLACE else ()))]
    commands += [["audit", "--markdown", next(iter(found))]]
    ran = run_all(commands, found.values())
    lost = {
        arguments[1]
        for arguments, _, out, _ in ran["done"]
        if arguments[0] == "audit" and "--json" in arguments and "transformer" in arguments[1]
        if any(name["newly"] for name in json.loads(out)["lost_names"])
    }
    for arguments, code, out, err in ran["done"]:
        expected = 1 if arguments[0] == "audit" and arguments[1] in lost else 0
        assert (code, err) == (expected, ""), (arguments, out, err)
    assert not ran["torch"]
    audits = [
        json.loads(out) for arguments, _, out, _ in ran["done"] if arguments[0] == "audit" and "--json" in arguments
    ]
    for audited in audits:
        assert audited["clean"] or any(name["newly"] for name in audited["lost_names"])
        verdicts = {id: patch["verdict"] for id, patch in audited["patches"].items()}
        assert set(verdicts.values()) <= {"apply", "upstream"}, verdicts
    planned = next(
        json.loads(out) for arguments, _, out, _ in ran["done"] if arguments[0] == "plan" and "--json" in arguments
    )
    actions = {id: patch["action"] for id, patch in planned["patches"].items()}
    absent = set() if "+" in cell else {id for id in actions if id.startswith("te-")}
    assert {id for id, action in actions.items() if action == "not-installed"} == absent
    assert set(actions.values()) <= {"apply", "upstream", "not-installed"}, actions


def test_every_command_knows_its_place_here():
    """A command that comes to the CLI comes to this module."""
    [actions] = [action for action in _parser()._actions if getattr(action, "choices", None)]
    assert set(actions.choices) <= {*COMMANDS, "pin", "audit", "status", "run", "new-patch"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Source trees of 0.19.2 and of Transformer Engine 2.20.2 with neither metadata nor a version."""
    core, engine = tmp_path_factory.mktemp("core"), tmp_path_factory.mktemp("engine")
    (core / "megatron/core").mkdir(parents=True)
    for entry in (fetch("0.19.2") / "megatron/core").iterdir():
        if entry.name not in ("package_info.py", "__pycache__"):
            (core / "megatron/core" / entry.name).symlink_to(entry)
    (engine / "transformer_engine").symlink_to(fetch("2.20.2", "transformer-engine") / "transformer_engine")
    return [core, engine]


def test_source_trees_without_metadata(bare):
    """A known body decides where a version is unknown, also where that of the other distribution is."""
    for trees in (bare, [fetch("0.19.2"), bare[1]]):
        ran = run_all([["plan"], *(["audit", str(tree)] for tree in trees)], trees)
        patches = {
            arguments[0]: json.loads(out)["patches"] for arguments, _, out, _ in ran["done"] if "--json" in arguments
        }
        found = {patch["action"] for patch in patches["plan"].values()}
        assert found <= {"apply", "upstream"}, patches["plan"]
        assert {patch["verdict"] for patch in patches["audit"].values()} <= {"apply", "upstream"}


def test_a_wheel():
    """Nothing of it is unpacked."""
    fetch("0.19.2")
    [wheel] = (cache_dir() / "megatron-core" / "wheels").glob("*-0.19.2-*.whl")
    for arguments, code, out, err in run_all([["audit", str(wheel)]], [])["done"]:
        assert (code, err) == (0, ""), (arguments, out, err)


def test_status_and_run():
    """Everything that the plan wants is applied, in the process that `run` starts; one import of megatron does."""
    found = [fetch("0.16.1")]
    command = [sys.executable, "-m", "shim", "run", "--", sys.executable, "-c", STATUS]
    environ = environment([*found, REPOSITORY])
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (first, _), (text, code), (report, json_code) = json.loads(done.stdout.splitlines()[-1])
    assert first, "shim run has not applied the patches by the import of megatron.core"
    report = json.loads(report)
    assert (code, json_code) == (0, 0), (text, done.stderr)
    assert first == report["digest"] and text.startswith(f"{len(report['applied'])} applied"), text
    assert {patch["state"] for patch in report["patches"].values()} <= {"applied", "upstream", "not-installed"}
