"""The proofs that need Transformer Engine, on this pair of releases: its Python layer, on a CPU."""

from importlib.metadata import version

import proof_cases
import pytest

from shim import testing
from shim.testing.cells import EVERYDAY_PAIRS

CELLS = "every"

PAIR = f"{testing.release()}+{version('transformer-engine')}"


def with_transformer_engine(patch, found):
    return patch.distribution == "transformer-engine" or found.te


@pytest.mark.parametrize("id, found", proof_cases.cases(with_transformer_engine, PAIR, EVERYDAY_PAIRS))
def test_a_proof_says_what_the_matrix_says(id, found):
    proof_cases.assert_what_the_matrix_says(id, found)
