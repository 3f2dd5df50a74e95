"""docs/environments.md: the record of `make environments`, and what a page makes of it."""

import json

from unit_helpers import REPOSITORY

import shim
from shim._matrix.load import load_matrix
from shim.maintenance.docs_environments import environments_page, read_record
from shim.maintenance.docs_training import status
from shim.maintenance.environments import AXIS, OF_TORCH, PAIRS, recorded_proofs
from shim.testing.cells import EVERYDAY_PAIRS

DATA = {
    "failed": ["lost"],
    "proofs": {
        "a": {"proof": "a", "verdict": "fixed", "reason": "", "stock": {"text": "off by 3.1e-01"}},
        "b": {"proof": "b", "verdict": "fixed", "reason": "", "stock": {"text": "RuntimeError: twice"}},
        "c": {
            "proof": "c",
            "verdict": "cannot run",
            "reason": "gloo of torch 2.6.0 has no x",
            "stock": {"text": "other"},
        },
        "d": {"proof": "d", "verdict": "cannot run", "reason": "it needs a GPU", "stock": None},
        "e": {"proof": "e", "verdict": "upstream", "reason": "", "stock": {"text": "off by nan"}},
        "lost": {"proof": "lost", "verdict": "broken", "reason": "no end", "stock": {"text": "no end"}},
        "none": {"proof": "", "verdict": "cannot run", "reason": "it has no proof", "stock": None},
    },
}
USUAL = {
    "a": {"stock": "off by 2.9e-01"},
    "b": {"stock": "TypeError: x"},
    "c": {"stock": "off by 1"},
    "e": {"stock": "off by 1e-3"},
}


def row(proofs):
    tests = {"torch": {"tests": "tests/ops", "ran": 1017, "failed": 3, "result": "failed"}}
    return {"python": "3.10", "triton": "3.2.0", "numpy": "2.2.6", "tests": tests, "proofs": proofs}


def test_what_is_kept_of_proofs():
    """Their verdicts, why some cannot run, and symptoms in other words than on torch 2.13; numbers may vary."""
    assert recorded_proofs(DATA, USUAL) == {
        "verdicts": {"broken": 1, "cannot run": 2, "fixed": 2, "upstream": 1},
        "cannot run": {"gloo of torch 2.6.0 has no x": 1, "it needs a GPU": 1},
        "failed": ["lost"],
        "differ": {"b": "RuntimeError: twice"},
    }


def test_the_page_has_a_line_for_each_run():
    page = environments_page({"2.6.0": row({"0.16.1+2.12.0": recorded_proofs(DATA, USUAL)})})
    assert "| 2.6.0 | 3.2.0, 2.2.6 | 3.10 | 0.16.1 + 2.12.0 | 2 | 1 | 2 | lost |" in page
    assert "| 2.6.0 | 3.10 | torch | tests/ops | 1017 | 3 |" in page
    assert "- torch 2.6.0, megatron-core 0.16.1: gloo of torch 2.6.0 has no x (proofs: 1)" in page
    assert "it needs a GPU" not in page
    assert "| b | 2.6.0 | 0.16.1 | RuntimeError: twice |" in page
    assert "| `torch._C._current_graph_task_id` | always | PagedStash leaves" in page
    assert "| `triton.constexpr_function` | from 3.5 |" in page
    said = status(load_matrix(), {"2.6.0": row({})}, f"\n## [{shim.__version__}] - 2026-01-01\n")
    assert said.startswith(f"Version {shim.__version__}. ")
    said = status(load_matrix(), {"2.6.0": row({})}, "\n## [Unreleased]\n")
    assert said.startswith(f"Version {shim.__version__}, unreleased. ")
    assert "with torch 2.6.0 to 2.13.0 on Python 3.10 to 3.11 ([table](docs/environments.md))" in said


def test_the_record_is_of_the_axis_and_all_its_proofs_have_a_right_verdict():
    record = read_record(REPOSITORY / "docs")
    assert {torch: found["python"] for torch, found in record.items()} == {one.torch: one.python for one in AXIS}
    for torch, found in record.items():
        assert tuple(found["proofs"]) == PAIRS[found["python"]], torch
        for pair, proofs in found["proofs"].items():
            assert proofs["failed"] == [] and set(proofs["verdicts"]) <= {"fixed", "upstream", "right", "cannot run"}, (
                pair
            )


def test_what_make_environments_runs_is_there():
    assert {pair for pairs in PAIRS.values() for pair in pairs} <= set(EVERYDAY_PAIRS)
    assert all((REPOSITORY / path).exists() for path in OF_TORCH)
    assert set(PAIRS) == {one.python for one in AXIS}
    json.dumps(read_record(REPOSITORY / "docs"))
