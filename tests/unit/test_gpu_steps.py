"""The ends of gpu/run.sh: no GPU, an archive that is missing, a step over its limit, a call that is cut."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import steps
from unit_helpers import REPOSITORY

from shim.testing.patience import patience

# Its steps are made here, and so is the GPU. Archives are in an empty directory.
PROGRAM = """
import sys
from pathlib import Path
import steps
steps.machine = lambda: {{"gpu": {gpu!r}, "tree": "t"}}
steps.BUNDLE = Path("bundle")
python = [sys.executable, "-u", "-c"]
Step = steps.Step
made = [{made}]
steps.steps = lambda dry: made
sys.exit(steps.main())
"""
QUICK = """Step("quick", "text", [*python, "print('seen')"], 60)"""
SLOW = """Step("slow", "text", [*python, "import time; print('half'); time.sleep(60)"], {limit})"""


@pytest.fixture
def started(tmp_path):
    running = []

    def start(*made, gpu="H200", options=()):
        program = PROGRAM.format(gpu=gpu, made=", ".join(made))
        command = [sys.executable, "-u", "-c", program, "--out", "out", *options]
        environment = {"PYTHONPATH": str(REPOSITORY / "gpu"), "PATH": ""}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def results(tmp_path):
    def read():
        lines = (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()
        return {found["step"]: found for found in map(json.loads, lines)}

    return read


def test_without_a_gpu_nothing_runs(started, results):
    process = started(QUICK, gpu="")
    said = process.communicate(timeout=patience())[0]
    assert process.returncode == 1
    assert "No GPU: nothing was run" in said
    assert results().keys() == {"machine"}


def test_a_pair_whose_archive_is_missing_is_left_out_and_others_run(started, results):
    process = started("""Step("tests", "tests", ["true"], 60, "1+2")""", QUICK)
    process.communicate(timeout=patience())
    assert process.returncode == 1
    found = results()
    assert found["tests, 1+2"]["state"] == "not run"
    assert found["tests, 1+2"]["why"] == "no gpu/bundle/1+2.tar.xz: make gpu-bundle"
    assert (found["quick"]["state"], found["quick"]["code"], found["quick"]["text"]) == ("ended", 0, "seen\n")


def test_all_that_ends_well(started, tmp_path):
    process = started(QUICK)
    process.communicate(timeout=patience())
    assert process.returncode == 0
    assert "[quick] seen\n" in (tmp_path / "out" / "log.txt").read_text("utf-8")


def test_a_step_over_its_limit_keeps_what_it_has_said(started, results):
    process = started(SLOW.format(limit=3.0), QUICK, options=("--jobs", "1"))
    process.communicate(timeout=patience())
    assert process.returncode == 1
    assert (results()["slow"]["state"], results()["slow"]["text"]) == ("over its limit", "half\n")
    assert results()["quick"]["state"] == "ended"


def test_what_is_late_is_not_started(started, results):
    process = started(QUICK, options=("--seconds", "1"))
    process.communicate(timeout=patience())
    assert (results()["quick"]["state"], results()["quick"]["why"]) == ("not run", "no time left")


def test_a_call_that_is_cut_keeps_what_it_has(started, results, tmp_path):
    alone = """Step("later", "text", ["true"], 60, alone=True)"""
    process = started(QUICK, SLOW.format(limit=60), alone)
    log = tmp_path / "out" / "log.txt"
    end = time.monotonic() + patience()
    while not (log.exists() and "[slow] half" in log.read_text("utf-8")) or "quick" not in results():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=patience())
    assert process.returncode == 128 + signal.SIGTERM
    found = results()
    assert found["quick"]["state"] == "ended"
    assert (found["slow"]["state"], found["slow"]["text"]) == ("cut", "half\n")
    assert "later" not in found


def test_outcomes_are_read_from_whole_and_from_cut_output():
    text = """\
[gw0] [ 10%] PASSED tests/gpu/test_a.py::test_x[a b-1]
[gw1] [ 20%] FAILED tests/gpu/test_a.py::test_y
tests/gpu/test_b.py::test_z[c, d] SKIPPED (no)                [ 30%]
tests/gpu/test_b.py::test_w PASSED                            [ 40%]
tests/gpu/test_b.py::test_v
SKIPPED [2] tests/gpu/test_b.py:7: this GPU cannot
"""
    found = steps.read_tests(text)
    assert found["counts"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert found["failed"] == ["tests/gpu/test_a.py::test_y"]
    assert found["passed"] == ["tests/gpu/test_a.py::test_x[a b-1]", "tests/gpu/test_b.py::test_w"]
    assert found["skipped"] == ["tests/gpu/test_b.py:7: this GPU cannot"]


def test_verdicts_are_read_and_output_that_is_cut_has_none():
    proofs = {
        "a": {"verdict": "fixed", "reason": "", "with_shim": {"text": "1e-7"}},
        "b": {"verdict": "cannot run", "reason": "it needs two GPUs", "with_shim": None, "stock": None},
    }
    found = steps.read_proofs(json.dumps({"proofs": proofs, "failed": []}))
    assert found["counts"] == {"fixed": 1, "cannot run": 1}
    assert found["proofs"] == {"a": ["fixed", "1e-7"], "b": ["cannot run", "it needs two GPUs"]}
    assert steps.read_proofs('{"proofs": {')["counts"] == {}


@pytest.mark.parametrize("dry", [False, True])
def test_steps_name_files_and_models_that_are_there(dry):
    models = (REPOSITORY / "tests/support/te_models.py").read_text("utf-8")
    found = steps.steps(dry)
    assert len({step.label for step in found}) == len(found)
    assert sum(step.seconds for step in found if step.alone) < 450
    for step in found:
        for part in step.command[1:]:
            assert not re.match(r"(gpu|tests|benchmarks)/", part) or (REPOSITORY / part).exists(), part
            if part.startswith("te_models:"):
                assert f"def {part.partition(':')[2]}(" in models
