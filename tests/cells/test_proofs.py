"""The proofs that need megatron-core alone, on this release."""

import proof_cases
import pytest
from megatron.core.transformer.moe import moe_utils

import shim
from shim import testing
from shim.testing.cells import EVERYDAY

CELLS = "every"


def alone(patch, found):
    return patch.distribution == "megatron-core" and not found.te


@pytest.mark.parametrize("id, found", proof_cases.cases(alone, testing.release(), EVERYDAY))
def test_a_proof_says_what_the_matrix_says(id, found, monkeypatch):
    if id == "moe-without-te" and shim.plan()[id].wanted:
        monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)  # moe_cases sets it, for other files
    proof_cases.assert_what_the_matrix_says(id, found)
