"""Every command of the CLI with the shipped matrix on real releases: what tests on matrices of their own cannot see.

One process for each set of releases runs all commands in turn, as text and as JSON, but `run` and `bisect`, which
test_bisect_command.py runs on a release.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from audit_cases import check_markdown, commit, git
from recording import NO_SOURCES
from thorough import in_full

from shim._matrix.load import load_matrix
from shim._tools.arguments import command_line
from shim._tools.audit import VERDICTS
from shim.testing import COMMITS, EVERYDAY, EVERYDAY_PAIRS, RELEASES, TE_RELEASES, cache_dir, environment, fetch
from shim.testing.patience import patience
from shim.testing.releases import FetchError

REPOSITORY = Path(__file__).resolve().parents[2]

# Runs command lines given as JSON; prints [command, exit code, standard output, standard error] for each. What an audit
# finds, seconds of work, is found once and then printed in each format.
DRIVER = """
import contextlib, io, json, sys
from shim._tools import audit
from shim._tools.cli import main

found, find, done = {}, audit.audit, []

def find_once(*given):
    line = tuple(word for word in arguments if word not in ("--json", "--markdown"))
    found[line] = found.get(line) or find(*given)
    return found[line]

audit.audit = find_once
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # of argparse
            code = end.code
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
PATCHES = load_matrix(pins=False).patches
COMMANDS = {
    "list": [[]],
    "plan": [["--require", "mtp-packed-sequences", "--strict", "--on-drift", "error"]],
    "explain": [["te-moved-symbols"]],
    "doctor": [[]],
    "info": [[]],
}
OF_MATRIX = [["matrix"], ["matrix", "--cells", "--pairs", "--range", ">=0.19"]]  # which asks for no installed release


def known(command):
    [actions] = [action for action in command_line()._actions if getattr(action, "choices", None)]
    return command in actions.choices


EVERY_FORMAT = ("", "--json", "--markdown")


def run_all(commands, directories, formats=("--json",)):
    """The results of the command lines in each of these formats; Markdown is for audits."""
    both = [[*arguments, *filter(None, [flag])] for arguments in commands for flag in formats]
    both = [arguments for arguments in both if arguments[0] == "audit" or arguments[-1] != "--markdown"]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(both),
        capture_output=True,
        text=True,
        env=environment([*directories, REPOSITORY]),
        timeout=patience(),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for arguments, _, out, _ in found["done"]:
        assert out, arguments
        if "--json" in arguments:
            json.loads(out)
        if "--markdown" in arguments:
            check_markdown(out)
    return found


def audited_by(arguments):
    """What a command line audits, in whatever format. () for another command."""
    return tuple(a for a in arguments[1:] if a not in ("--json", "--markdown")) if arguments[0] == "audit" else ()


def audits_of(ran):
    """What the audits found, by what was audited. Exit code and `clean` say the same; every patch has its verdict."""
    found = {}
    for arguments, code, out, err in ran["done"]:
        if arguments[0] == "audit":
            # A download for a diff is announced.
            assert code in (0, 1) and not [x for x in err.splitlines() if "fetching" not in x], (arguments, out, err)
        if arguments[0] == "audit" and "--json" in arguments:
            audited = found[audited_by(arguments)] = json.loads(out)
            assert audited["clean"] is (code == 0), (arguments, out)
            here = set(audited["audited"])
            assert {id for id, entry in PATCHES.items() if entry.distribution in here} <= set(audited["patches"])
            for id, patch in audited["patches"].items():
                assert patch["verdict"] in VERDICTS and patch["reason"], (arguments, id)
                amiss = patch["verdict"] in ("drifted", "gone")
                assert patch["differences"] or not amiss, (arguments, id)
                assert all(d["diff"] or not d["nearest"] for d in patch["differences"]), (arguments, id)
                assert not (amiss and audited["clean"]), (arguments, id)
    return found


def releases(cell):
    core, _, engine = cell.partition("+")
    named = [("megatron-core", core)] if core else []
    named += [("transformer-engine", engine)] if engine else []
    return {f"{name}=={release}": fetch(release, name) for name, release in named}


# The oldest release and the newest pair; with SHIM_TEST_EVERY_RELEASE=1 every supported release
# of both, and every pair of `make test`.
EVERY = [*RELEASES, *dict.fromkeys([*EVERYDAY_PAIRS, *(f"{RELEASES[-1]}+{engine}" for engine in TE_RELEASES)])]
SOME = [EVERYDAY[0], EVERYDAY_PAIRS[-1]]
CELLS = EVERY if os.environ.get("SHIM_TEST_EVERY_RELEASE") == "1" else SOME


def needed_by(id):
    """The distributions without which there is nothing to patch."""
    return {PATCHES[id].distribution, *PATCHES[id].needs}


# There audits are of directories too, and in Markdown, and what asks for no release is run.
IN_FULL = {"0.12.0", EVERYDAY_PAIRS[-1]} if CELLS is EVERY else {"0.12.0"}


@pytest.mark.parametrize("cell", CELLS)
def test_every_command_that_imports_nothing(cell, tmp_path):
    """On releases as they were published: nothing on standard error, no torch, and exit code 0; but 1 of an audit of a
    Transformer Engine that has just lost a name, and of the doctor beside one without its library."""
    found = releases(cell)
    lock = str(tmp_path / "shim.lock")
    commands = [[command, *more] for command, ways in COMMANDS.items() if known(command) for more in ways]
    commands += [["pin", "--lock", lock], ["plan", "--lock", lock], ["diff", lock], ["diff", lock, lock]]
    commands += OF_MATRIX if cell in IN_FULL else []
    commands += [["audit", target] for target in (*found, *(map(str, found.values()) if cell in IN_FULL else ()))]
    pairs = [["audit", one, "--with", other] for one in found for other in found if one != other]
    ran = run_all([*commands, *pairs], found.values(), EVERY_FORMAT[: 3 if cell in IN_FULL else 2])
    audits = audits_of(ran)
    lost = {target for target, audited in audits.items() if any(name["newly"] for name in audited["lost_names"])}
    for arguments, code, out, err in ran["done"]:
        without_library = arguments[0] == "doctor" and "+" in cell  # wheels of Transformer Engine have Python alone
        assert (code, err) == (int(without_library or audited_by(arguments) in lost), ""), (arguments, out, err)
        if arguments == ["doctor", "--json"]:
            problems = json.loads(out)["problems"]
            assert len(problems) == without_library and all("has no core library" in text for text in problems)
    assert not ran["torch"]
    for target, audited in audits.items():
        assert audited["clean"] or target in lost
        verdicts = {id: patch["verdict"] for id, patch in audited["patches"].items()}
        judged = {verdict for id, verdict in verdicts.items() if verdict != "not-installed"}
        assert judged <= {"apply", "upstream", "not-needed"}, (target, verdicts)
        # Without the other release, what is not judged is of the other distribution, or needs it.
        aside = {id for id, verdict in verdicts.items() if verdict == "not-installed"}
        assert not (aside and "--with" in target)
        assert all(not needed_by(id) <= set(audited["audited"]) for id in aside)
    planned = next(
        json.loads(out) for arguments, _, out, _ in ran["done"] if arguments[0] == "plan" and "--json" in arguments
    )
    actions = {id: patch["action"] for id, patch in planned["patches"].items()}
    absent = set() if "+" in cell else {id for id in actions if "transformer-engine" in needed_by(id)}
    assert {id for id, action in actions.items() if action == "not-installed"} == absent
    assert set(actions.values()) <= {"apply", "upstream", "not-needed", "not-installed"}, actions
    for target, audited in audits.items():
        if "--with" in target:  # the pair that is installed here, and the plan for it is the truth
            verdicts = {id: patch["verdict"] for id, patch in audited["patches"].items()}
            assert verdicts.items() <= actions.items(), target


def unsupported(*names):
    """Releases and commits that nobody supports, where their sources are at hand or can be fetched."""
    for name in names:
        try:
            fetch(name)
        except FetchError as error:
            pytest.skip(f"{NO_SOURCES}megatron-core {name}: {str(error).splitlines()[0]}")
    return names


# Their bodies are known or not, in whatever mixture; commits are main, dev, and what trainers pin.
CANDIDATES = ["0.14.0rc0", "0.14.0rc1", "0.15.0rc7", "0.16.0rc0.dev132550"]
MAIN = "d98e8a64dd"
OTHERS = [*CANDIDATES, *COMMITS] if len(CELLS) == len(EVERY) else CANDIDATES[:1]


@pytest.mark.parametrize("release", OTHERS)
def test_audits_of_what_nobody_supports(release):
    """By name, alone and beside a Transformer Engine. Nothing fails but what the verdicts say."""
    [name] = unsupported(release)
    te = f"transformer-engine=={TE_RELEASES[-1]}"
    commands = [["audit", f"=={name}"], ["audit", f"=={name}", "--with", te]]
    audits = audits_of(run_all(commands, [], EVERY_FORMAT))
    assert len(audits) == 2
    for audited in audits.values():
        assert audited["audited"]["megatron-core"]["version"]
        assert {patch["distribution"] for patch in audited["patches"].values()} == {"megatron-core"}
        assert set(audited["patches"]) == {id for id, e in PATCHES.items() if e.distribution == "megatron-core"}


ENGINES = sorted({pair.partition("+")[2] for pair in EVERYDAY_PAIRS}) if len(CELLS) == len(EVERY) else TE_RELEASES[-1:]


@pytest.mark.parametrize("release", ENGINES)
def test_main_beside_a_source_tree_of_transformer_engine(release, bare, tmp_path):
    """On one path without metadata: audit, plan and status of a tree that nobody has released."""
    unsupported(MAIN)
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "transformer_engine").symlink_to(fetch(release, "transformer-engine") / "transformer_engine")
    trees = [fetch(MAIN), engine]
    one, other = map(str, trees)
    commands = [["audit", one], ["audit", one, "--with", other], ["audit", other, "--with", one]]
    ran = run_all([["plan"], *commands], trees)
    audits = audits_of(ran)
    assert len(audits) == len(commands)
    [planned] = [json.loads(out) for arguments, _, out, _ in ran["done"] if arguments == ["plan", "--json"]]
    for target, audited in audits.items():
        if "--with" in target:
            for id, patch in audited["patches"].items():
                action = planned["patches"][id]["action"]
                assert action == ("drifted" if patch["verdict"] == "gone" else patch["verdict"]), id


# Every command; those that import torch come last. Of Markdown to be pasted and JSON, lines stay whole.
PRINTED = """
plan|plan -v|plan --for mtp,packed,lora|plan --config RUN|plan --concerns mtp,packed|plan --concerns RUN -v|list|info
explain te-moved-symbols|explain mtp-packed-sequences -v|doctor|pin --lock LOCK|diff LOCK|matrix|audit ==0.17.1
plan --for paked|plan --require nothing|explain nothing|pin|frobnicate|plan --lock RUN|new-patch
bisect --dir DIR -- true|prove rope-thd --ranks 1|prove nothing|status|status -v
"""
ARGUMENTS = "train.py --tensor-model-parallel-size 2 --mtp-num-layers 1 --sequence-parallel --num-layers 4"
OF_A_HEADER = re.compile(r" {4}[- ]+| {8}.{,120}")  # tables and code of a patch's header, in explain -v


def too_wide(words, text):
    """The lines of more than 80 columns."""
    wide = [line for line in text.splitlines() if len(line) > 80]
    return [line for line in wide if not (words[0] == "explain" and OF_A_HEADER.fullmatch(line))]


@in_full  # tests/unit/test_terminal.py has the screens of the commands in 80 columns
@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"] if len(CELLS) == len(EVERY) else ["0.19.2"])
def test_no_line_is_wider_than_80_columns(release, tmp_path):
    (tmp_path / "run.sh").write_text(f"python {ARGUMENTS}")
    names = {"RUN": tmp_path / "run.sh", "LOCK": tmp_path / "shim.lock", "DIR": tmp_path / "bisect"}
    commands = [line.split() for line in PRINTED.strip().replace("\n", "|").split("|")]
    commands = [[str(names.get(word, word)) for word in words] for words in commands]
    assert {words[0] for words in commands} >= set(subcommands()) - {"run"}
    commands += [[command, "--help"] for command in subcommands()]
    environ = {**environment([fetch(release), REPOSITORY]), "PYTHONWARNINGS": "ignore"}
    environ.pop("COLUMNS", None)
    run = ["run", "--concerns", "mtp,packed", "--", sys.executable, "-c", "import megatron.core"]
    driver = [sys.executable, "-c", DRIVER]
    first, second = (
        subprocess.run(command, input=given, capture_output=True, text=True, env=environ, timeout=patience())
        for command, given in ((driver, json.dumps(commands)), ([sys.executable, "-m", "shim", *run], ""))
    )
    assert first.returncode == second.returncode == 0, (first.stderr, second.stderr)
    done = [*json.loads(first.stdout.splitlines()[-1])["done"], [run, 0, second.stdout, second.stderr]]
    for words, _, *said in done:
        assert any(said), words
        for text in said:
            assert not too_wide(words, text), words
    printed = {" ".join(words): out for words, _, out, _ in done}
    assert len(printed["info"].splitlines()) <= 15 and len(printed["plan"].splitlines()) <= 50
    assert "shim at the end: " in second.stderr and "a run with mtp,packed" in " ".join(second.stderr.split())


def test_a_plan_beside_transformer_engine_fits_a_screen():
    """It counts what the pair gets wrong and loses, and names no note; -v has both, and no line is wider."""
    environ = environment([fetch("0.16.1"), fetch("2.12.0", "transformer-engine"), REPOSITORY])
    environ.pop("COLUMNS", None)
    lines = []
    for words in (["plan"], ["plan", "-v"]):
        command = [sys.executable, "-m", "shim", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=patience())
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines())
    assert len(lines[0]) <= 50 and "Notes:" in lines[1]
    assert not too_wide(["plan"], "\n".join(lines[0] + lines[1]))
    assert "features lost with this TE: 2 fixed, 1 lost (-v)" in " ".join(" ".join(lines[0]).split())


def subcommands():
    [actions] = [action for action in command_line()._actions if getattr(action, "choices", None)]
    return list(actions.choices)


def test_every_command_knows_its_place_here():
    """A command that comes to the CLI comes to this module."""
    [actions] = [action for action in command_line()._actions if getattr(action, "choices", None)]
    assert set(actions.choices) <= {
        *COMMANDS,
        "matrix",
        "pin",
        "diff",
        "audit",
        "status",
        "run",
        "bisect",
        "new-patch",
        "prove",
    }


@pytest.fixture(autouse=True)
def all_that_fits(monkeypatch):
    """What changes rounding is asked for: an audit judges every patch, and a plan says the same then."""
    monkeypatch.setenv("MEGATRON_SHIM_ROUNDING", "1")


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
    """A known body decides where a version is unknown, also where that of the other distribution is.

    Of a patch whose functions are all missing nothing is known: they may stand elsewhere.
    """
    without_a_body = {"te-permutation", "te-requires-grad"}
    for trees in (bare, [fetch("0.19.2"), bare[1]]):
        ran = run_all([["plan"], *(["audit", str(tree)] for tree in trees)], trees)
        patches = {
            arguments[0]: json.loads(out)["patches"] for arguments, _, out, _ in ran["done"] if "--json" in arguments
        }
        found = {patch["action"] for id, patch in patches["plan"].items() if id not in without_a_body}
        assert found <= {"apply", "upstream", "not-needed"}, patches["plan"]
        assert {patches["plan"][id]["action"] for id in without_a_body} == {"drifted"}
        assert {patch["verdict"] for id, patch in patches["audit"].items() if id not in without_a_body} <= {
            "apply",
            "upstream",
            "not-needed",
            "not-installed",
        }


def test_a_release_in_every_form(tmp_path):
    """A wheel, an sdist, the archive of a repository, a directory or a commit of it: the same findings."""
    source = fetch("0.19.2") / "megatron"
    [wheel] = (cache_dir() / "megatron-core" / "wheels").glob("*-0.19.2-*.whl")
    checkout = tmp_path / "checkout"
    shutil.copytree(source, checkout / "megatron", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    (checkout / "megatron/core/transformer/mlp.py").open("a").write("\n# a comment counts for nothing\n")
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(checkout, "megatron_core-0.19.2")
    shutil.make_archive(str(tmp_path / "main"), "zip", tmp_path, "checkout")
    targets = [[str(place)] for place in (checkout, wheel, tmp_path / "sdist.tar.gz", tmp_path / "main.zip")]
    if shutil.which("git"):
        git(checkout, "init", "-q")
        commit(checkout)
        shutil.rmtree(checkout / "megatron" / "core" / "transformer")
        targets = [[str(checkout), "--ref", "HEAD"], *targets[1:]]
    ran = run_all([["audit", *target] for target in targets], [])
    audits = audits_of(ran)
    assert len(audits) == len(targets)
    assert {code for _, code, _, _ in ran["done"]} == {0} and {err for _, _, _, err in ran["done"]} == {""}
    first, *others = [
        (audited["patches"], audited["audited"]["megatron-core"]["version"]) for audited in audits.values()
    ]
    assert all(other == first for other in others)


def test_status_and_run():
    """Everything that the plan wants is applied, in the process that `run` starts; one import of megatron does."""
    found = [fetch("0.16.1")]
    command = [sys.executable, "-m", "shim", "run", "--", sys.executable, "-c", STATUS]
    environ = environment([*found, REPOSITORY])
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=patience())
    assert done.returncode == 0, done.stderr
    (first, _), (text, code), (report, json_code) = json.loads(done.stdout.splitlines()[-1])
    assert first, "shim run has not applied the patches by the import of megatron.core"
    report = json.loads(report)
    assert (code, json_code) == (0, 0), (text, done.stderr)
    assert first == report["digest"] and text.startswith(f"{len(report['applied'])} patches applied"), text
    assert {patch["state"] for patch in report["patches"].values()} <= {
        "applied",
        "upstream",
        "not-needed",
        "not-installed",
    }
