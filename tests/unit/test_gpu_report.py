"""Numbers of a GPU come into the documents from a run alone, whose log has them."""

import json

import pytest
import report
import steps
from unit_helpers import REPOSITORY

from shim.maintenance import docs_gpu

MACHINE = {
    "step": "machine",
    "state": "NVIDIA H200",
    "dry": False,
    "gpu": "NVIDIA H200",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "triton": "3.6.0",
    "python": "3.12.3",
    "tree": "this",
}
PROOFS = {"p": {"verdict": "fixed", "reason": "", "with_shim": {"text": "x"}}}
OUTCOMES = """\
[gw0] [ 9%] PASSED tests/gpu/t.py::test_a[DelayedScaling]
[gw0] [ 9%] FAILED tests/gpu/t.py::test_b
"""
SAID = {
    "tests/gpu, 1+2.11.0": OUTCOMES,
    "prove, 1+2.11.0": json.dumps({"proofs": PROOFS}) + "\n",
    "steps, 1+2.11.0": "| dense | stock | 6.2 |\n",
}
KINDS = {"tests/gpu": "tests", "prove": "proofs", "steps": "text"}


def found():
    lines = [dict(MACHINE)]
    for label, text in SAID.items():
        name, _, pair = label.partition(", ")
        about = {"step": label, "name": name, "pair": pair, "kind": KINDS[name], "state": "ended", "dry": False}
        lines.append({**about, "alone": name == "steps", **steps.READERS[KINDS[name]](text)})
    return [*lines, {"step": "late", "state": "not run", "why": "no time left", "dry": False}]


@pytest.fixture
def written(tmp_path):
    def write(results):
        log = "".join(f"[{label}] {line}\n" for label, text in SAID.items() for line in text.splitlines())
        (tmp_path / "log.txt").write_text(f"[prove, 1+2.11.0!] 1 of 2\n{log}", "utf-8")
        (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in results), "utf-8")
        return tmp_path

    return write


def test_a_run_is_taken_as_it_is(written):
    record = report.record_of(written(found()), "this")
    assert record == {"machine": MACHINE, "steps": found()[1:]}


def changed(place, **values):
    lines = found()
    lines[place].update(values)
    return lines


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (changed(0, gpu=""), "no GPU"),
        (changed(0, dry=True), "dry run"),
        (changed(2, dry=True), "dry run"),
        (changed(0, tree="other"), "of the sources other"),
        (changed(1, counts={"passed": 3}), "tests/gpu, 1\\+2.11.0: counts are not what the log says"),
        (changed(1, failed=[]), "failed are not what the log says"),
        (changed(2, counts={"fixed": 2}), "counts are not what the log says"),
        (changed(3, text="| dense | stock | 3.1 |\n"), "text are not what the log says"),
        (changed(3, step="steps, 1+2.12.0"), "text are not what the log says"),
        ([MACHINE, found()[-1]], "no step has run"),
        ([], "no GPU"),
    ],
)
def test_numbers_without_a_run_are_refused(written, lines, why):
    with pytest.raises(report.NoRunError, match=why):
        report.record_of(written(lines), "this")


def test_a_directory_without_a_run_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    before = {file: file.stat().st_mtime_ns for file in (REPOSITORY / "docs").iterdir()}
    assert report.main() == 1
    assert "Nothing was written" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in (REPOSITORY / "docs").iterdir()} == before


def test_without_a_record_pages_are_as_they_were():
    assert docs_gpu.gpu_status(None) == docs_gpu.NOT_RUN
    assert docs_gpu.gpu_environments(None) == ""
    assert docs_gpu.gpu_measured(None) == "These have not run yet."


def test_pages_have_what_the_record_has():
    record = {"machine": MACHINE, "steps": found()[1:]}
    assert docs_gpu.gpu_status(record) == (
        "H200 with TE 2.11.0: 1 tests passed, 1 failed ([results](docs/environments.md)). Not run: FP4."
    )
    assert "| tests/gpu | 1 + 2.11.0 | 1 failed, 1 passed | t.py::test_b |" in docs_gpu.gpu_environments(record)
    assert "| prove | 1 + 2.11.0 | 1 fixed | none |" in docs_gpu.gpu_environments(record)
    assert "steps, 1+2.11.0:\n\n```\n| dense | stock | 6.2 |\n```" in docs_gpu.gpu_measured(record)


def test_readme_grows_by_no_result():
    step = {"kind": "tests", "state": "ended", "passed": ["test_a"], "counts": {"passed": 999, "failed": 99}}
    both = [{**step, "pair": "0.16.1+2.11.0"}, {**step, "pair": "0.19.2+2.20.2"}]
    assert len(docs_gpu.gpu_status({"machine": {"gpu": "NVIDIA H200"}, "steps": both})) <= len(docs_gpu.NOT_RUN)
