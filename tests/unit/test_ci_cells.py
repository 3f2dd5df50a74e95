"""The cells a trainer should test, and the example workflow, whose steps are run here so that it cannot rot."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from packaging.version import Version
from unit_helpers import BROKEN, MATRIX, REPOSITORY, megatron, write_file

from shim._errors import OptionError
from shim._matrix.cells import cells
from shim._matrix.load import load_matrix
from shim._tools.arguments import command_line
from shim._tools.cli import main
from shim.testing.patience import patience

EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")


def core(*releases):
    return [{"megatron-core": release} for release in releases]


# Cells


@pytest.fixture
def three(world):
    """The matrix of the fake world, in which all three releases differ."""
    return load_matrix(world.matrix)


def test_releases_that_differ_are_cells(three):
    """In the order of their versions."""
    assert cells(three) == core("0.16.0", "0.17.0", "0.18.0")


def test_of_releases_that_no_patch_can_tell_apart_the_newest_is_a_cell(world):
    """Whatever the order of the supported list."""
    for name, like in (("0.16.1", "0.16.0"), ("0.16.10", "0.16.0"), ("0.18.1", "0.18.0")):
        shutil.copytree(world.root / "releases" / like, world.root / "releases" / name)
    fixed = world.root / "releases/0.18.1/megatron/core/roll.py"  # what no patch is applied to may differ
    fixed.write_text(fixed.read_text().replace("return x\n", "return x + 0\n", 1))
    world.pin(
        MATRIX.replace('"0.16.0", "0.17.0", "0.18.0"', '"0.18.1", "0.16.10", "0.16.1", "0.16.0", "0.17.0", "0.18.0"')
    )
    assert cells(load_matrix(world.matrix)) == core("0.16.10", "0.17.0", "0.18.1")


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (None, core("0.16.0", "0.17.0", "0.18.0")),
        ("", core("0.16.0", "0.17.0", "0.18.0")),
        (">=0.17", core("0.17.0", "0.18.0")),
        (">=0.16,!=0.17.*,<1", core("0.16.0", "0.18.0")),
        ("==0.18.0", core("0.18.0")),
    ],
)
def test_a_range_leaves_some(three, spec, found):
    """PEP 440, over megatron-core."""
    assert cells(three, spec) == found


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (">=1", "no supported release of megatron-core lies in '>=1'"),
        ("0.16", "'0.16' is not a range"),
        (">=x", "is not a range"),
        ("===0.16.0-x!", "is not a range"),
        (">=" + "9" * 5000, "is not a range|no supported"),
    ],
)
def test_a_range_that_leaves_nothing_is_an_error(three, spec, message):
    """An empty matrix would be a green run of a CI that tests nothing."""
    with pytest.raises(OptionError, match=message):
        cells(three, spec)


def test_pairs_are_products(world):
    """With the releases of Transformer Engine that differ; the range is over megatron-core alone."""
    for release in ("2.1.0", "2.2.0"):
        (world.root / "releases" / release).mkdir()
    world.pin(MATRIX.replace("\n\npatches", '\n  transformer-engine: ["2.1.0", "2.2.0"]\n\npatches', 1))
    matrix = load_matrix(world.matrix)
    assert cells(matrix, ">=0.17", pairs=True) == [
        {"megatron-core": release, "transformer-engine": "2.2.0"} for release in ("0.17.0", "0.18.0")
    ]


def test_the_cells_of_the_shipped_matrix_meet_every_set_of_bodies():
    """Each release agrees with a cell in all that is pinned; GitHub takes no more than 256 jobs."""
    matrix = load_matrix()
    pins = matrix.pins["megatron-core"]

    def applied(release):
        return {id: pin for id, pin in pins[release].items() if pin.variant}

    found = [cell["megatron-core"] for cell in cells(matrix)]
    assert found == sorted(found, key=Version) and len(set(found)) == len(found)
    for release in matrix.supported["megatron-core"]:
        assert any(applied(release) == applied(cell) for cell in found), release
    assert len(cells(matrix, pairs=True)) <= 256


def test_the_command_prints_json_or_one_line(capsys, world, monkeypatch):
    """--github is what fromJSON() takes; --json changes neither."""
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    for more in ([], ["--json"]):
        assert main(["matrix", "--cells", *more]) == 0
        assert json.loads(capsys.readouterr().out) == core("0.16.0", "0.17.0", "0.18.0")
        assert main(["matrix", "--github", "--range", ">=0.17", *more]) == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and json.loads(out) == {"include": core("0.17.0", "0.18.0")}
    assert main(["matrix", "--github", "--range", ">=9"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no supported release" in said.err


# The example workflow

WORKFLOW = REPOSITORY / "examples" / "github-workflow.yml"
BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]


def steps_of(job):
    return {step["name"]: step for step in job["steps"] if "run" in step}


def downloads(script):
    return "pip install" in script


@pytest.fixture
def run_step(world, tmp_path):
    """Run the script of a step as a runner does; returns exit code, what it wrote for GitHub, and what it said."""
    where = tmp_path / "workspace"
    where.mkdir()
    (tmp_path / "bin").mkdir()
    for name, code in {
        "shim": "from shim._tools.cli import main\nsys.exit(main())",
        "python": "import os\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    }.items():
        script = write_file(tmp_path / "bin" / name, f"#!{sys.executable}\nimport sys\n{code}\n")
        script.chmod(0o755)
    cache = tmp_path / "cache" / "megatron-core"
    cache.mkdir(parents=True)
    for release in ("0.16.0", "0.17.0", "0.18.0"):
        (world.root / "releases" / release / ".complete").touch()
        (cache / release).symlink_to(world.root / "releases" / release)

    # The steps are for the shipped matrix, and allow no packages.
    trust = "import shim._matrix.load as m\nm.TRUSTED = (*m.TRUSTED, 'trainer_patches')\n"
    write_file(world.own / "sitecustomize.py", trust)

    def run(step, **variables):
        assert "${{" not in step["run"], "expressions belong into env, where no shell reads them"
        given = {name: str(value) for name, value in step.get("env", {}).items()}
        files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        paths = [REPOSITORY, world.own, *variables.pop("path", [])]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_SHIM_")}
        environ |= {
            "PATH": os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "MEGATRON_SHIM_MATRIX": str(world.matrix),
            "MEGATRON_SHIM_CACHE": str(tmp_path / "cache"),
            **{name: str(file) for name, file in files.items()},
            **given,
            **variables,
        }
        done = subprocess.run(
            [BASH, "-e", "-c", step["run"]], cwd=where, env=environ, capture_output=True, text=True, timeout=patience()
        )
        return done.returncode, {name: file.read_text() for name, file in files.items()}, done.stdout + done.stderr

    run.where = where
    return run


needs_bash = pytest.mark.skipif(BASH is None, reason="the steps of a workflow are scripts for bash")


@needs_bash
def test_the_first_job_puts_the_cells_into_its_output(jobs, run_step):
    """The name of the output is the one the other job reads."""
    step = steps_of(jobs["cells"])["List the cells"]
    code, files, said = run_step(step)
    assert code == 0, said
    name, _, value = files["GITHUB_OUTPUT"].rstrip("\n").partition("=")
    assert json.loads(value) == {"include": core("0.16.0", "0.17.0", "0.18.0")}
    assert jobs["cells"]["outputs"][name] == f"${{{{ steps.{step['id']}.outputs.{name} }}}}"
    assert jobs["test"]["strategy"]["matrix"] == f"${{{{ fromJSON(needs.cells.outputs.{name}) }}}}"
    assert jobs["test"]["needs"] == "cells"


@needs_bash
def test_the_first_job_fails_where_there_are_no_cells(jobs, run_step):
    """Else the second would be skipped, and the run green."""
    code, files, _ = run_step(steps_of(jobs["cells"])["List the cells"], RANGE=">=99")
    assert code == 2 and files["GITHUB_OUTPUT"] == ""


@needs_bash
def test_the_second_job_says_which_patches_apply_and_runs_the_tests(jobs, run_step, tmp_path):
    """And fails at the first of them where a correctness patch has drifted."""
    steps = steps_of(jobs["test"])
    good = megatron(tmp_path / "good", "0.16.0", {"roll.py": BROKEN})
    code, _, said = run_step(steps["Say which patches apply"], path=[good])
    assert code == 0 and "To apply:\n  roll-fix: " in said
    bad = megatron(tmp_path / "bad", "0.16.0", {"roll.py": EDITED})
    assert run_step(steps["Say which patches apply"], path=[bad])[0] == 1
    for text, expected in (("def test(): pass\n", 0), ("def test(): assert 0\n", 1)):
        write_file(run_step.where / "tests" / "test_trainer.py", text)
        code, _, said = run_step(steps["Test"])
        assert code == expected, said


@needs_bash
def test_the_third_job_posts_its_audit_and_fails_where_somebody_has_to_look(jobs, run_step):
    """The summary is there in both cases."""
    step = steps_of(jobs["audit"])["Audit the main branch"]
    [checkout] = [s for s in jobs["audit"]["steps"] if "repository" in s.get("with", {})]
    place = run_step.where / checkout["with"]["path"]
    megatron(place, "0.19.0", {"roll.py": BROKEN})
    code, files, said = run_step(step)
    assert code == 0, said
    assert files["GITHUB_STEP_SUMMARY"].startswith("### shim audit: megatron-core 0.19.0\n")
    megatron(place, "0.19.0", {"roll.py": EDITED})
    code, files, said = run_step(step)
    assert code == 1, said
    assert "+    return helper(x) + 1" in files["GITHUB_STEP_SUMMARY"]
    shutil.rmtree(place)
    assert run_step(step)[0] == 2


def test_the_steps_that_are_not_run_here_only_install(jobs):
    """With plain pip, from wherever it is configured to; the release without dependencies, for any Python."""
    lines = [
        line
        for job in jobs.values()
        for s in job["steps"]
        if downloads(s.get("run", ""))
        for line in s["run"].splitlines()
    ]
    assert lines and all(line.startswith("python -m pip install ") for line in lines)
    assert not [line for line in lines if re.search(r"index|://|\$\{\{", line)]
    of_shim = [line for line in lines if "$SHIM" in line]
    assert of_shim == ["python -m pip install $SHIM"] * 5  # unquoted, so that the shell finds the wheel
    releases = [line for line in lines if "megatron-core" in line]
    install = "python -m pip install --no-deps --ignore-requires-python"
    assert releases == [f'{install} "megatron-core==$MEGATRON_CORE"', f"{install} megatron-core"]
    assert jobs["test"]["env"]["MEGATRON_CORE"] == "${{ matrix.megatron-core }}"
    named = [(job, name) for job in ("cells", "test", "audit", "prove", "newest-torch") for name in steps_of(jobs[job])]
    assert [name for job, name in named if not downloads(steps_of(jobs[job])[name]["run"])] == [
        "List the cells",
        "Say which patches apply",
        "Test",
        "Audit the main branch",
        "Prove on the main branch",
        "Let the proofs decide about changed functions",
        "Prove with the newest torch",
    ]  # fmt: skip


def test_the_audit_runs_on_a_schedule_and_the_tests_do_not():
    """`on` is true to a YAML reader of version 1.1."""
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert workflow[True]["schedule"] and workflow["permissions"] == {"contents": "read"}
    for daily in ("audit", "prove", "newest-torch"):
        assert "== 'schedule'" in workflow["jobs"][daily]["if"]
    assert workflow["jobs"]["cells"]["if"] == "github.event_name != 'schedule'"


def test_the_commands_in_the_document_are_commands():
    """docs/ci.md; each line of its shell blocks parses."""
    text = (REPOSITORY / "docs" / "ci.md").read_text("utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program in ("shim", "git", "python")
        if program == "python":
            assert arguments[:2] == ["-m", "shim.testing.cells"]
        if program == "shim":
            command_line().parse_args(arguments)
    assert "examples/github-workflow.yml" in text
