"""The paged stash under torch's own operators: gradients bit for bit, and docs/paged-stash-operators.md as it is."""

import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from stash_operators import FEATURES, head  # noqa: E402

TOP = Path(__file__).resolve().parent.parent.parent
VERSION = re.search(r"With torch ([\d.]+)\.", (TOP / "docs" / "paged-stash-operators.md").read_text())[1]


@pytest.mark.skipif(torch.__version__.partition("+")[0] != VERSION, reason=f"the page is about torch {VERSION}")
def test_operators_do_as_the_page_says(run_python):
    """Those that are stashed, and those that divide; all samples of all with SHIM_TEST_ALL_OPERATORS=1."""
    every = bool(os.environ.get("SHIM_TEST_ALL_OPERATORS"))
    done = run_python("-W", "ignore", "tests/support/stash_operators.py", "--all" if every else "--quick")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) > 100


def test_the_page_has_what_a_user_has_to_know():
    text = (TOP / "docs" / "paged-stash-operators.md").read_text()
    assert "WRONG" not in text and text.count("| stashed |") > 70
    for name in ("mm", "addmm", "bmm", "cat", "split", "mul", "nn.functional.silu", "nn.functional.gelu"):
        assert f"| {name} |" in text


def test_each_feature_on_the_page_is_held_by_a_test():
    assert (TOP / "docs" / "paged-stash-operators.md").read_text().startswith(head(VERSION))
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    missing = [test for _, _, test in FEATURES if f"\ndef {test}(" not in tests]
    assert not missing
