"""The proofs that need megatron-core alone, on this release."""

import proof_cases
import pytest

from shim import testing
from shim.testing.cells import EVERYDAY


def alone(patch, found):
    return patch.distribution == "megatron-core" and not found.te


@pytest.mark.parametrize("id, found", proof_cases.cases(alone, testing.release(), EVERYDAY))
def test_a_proof_says_what_the_matrix_says(id, found):
    proof_cases.assert_what_the_matrix_says(id, found)
