"""Which patches both sides of a proof have beside the one that it is about."""

from types import SimpleNamespace

import pytest

from shim._proving import run
from shim._proving.results import Result
from shim._proving.run import Request

PROOF = SimpleNamespace(name="first", beside=("other",), te=False, options=None)
RESULT = Result("roll-fix", "first", "first", "correctness", "silent", "cpu", "", "", "apply", "old")


@pytest.mark.parametrize(
    ("trial", "beside"),
    [
        (None, ("other",)),
        ({"roll-fix": "old"}, ("other",)),  # its bodies are known
        ({"roll-fix": "old", "other": "new"}, ("other",)),
        ({"roll-fix": "old", "other": ""}, ()),  # the tree is right without it, or no variant fits
    ],
)
def test_a_patch_that_the_tree_does_not_get_is_not_required(trial, beside):
    """As mtp-gather-gradient, which releases from 0.14 on do not need, beside mtp-full-embeddings."""
    request = Request(trial=trial)
    case = run._case("first", "m", PROOF, RESULT, "cpu", 1, request)
    assert (case.stock.ids or (), case.patched.ids) == (beside, ("roll-fix", *beside))
    plan = SimpleNamespace(
        environment=SimpleNamespace(installed={}), decisions={"other": SimpleNamespace(action="drifted")}
    )
    assert bool(run._missing(PROOF, plan, request)) == bool(beside)
