"""Fixtures of the release cells: the megatron-core on PYTHONPATH, on CPU, here or in two or four forked ranks."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shim import testing

# For recompute_cases, here and in layouts.
sys.path.insert(0, str(Path(__file__).parent))

# Without a release nothing here can run; run_cells takes a cell without tests for a failure.
if find_spec("megatron") is None or find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before any rank is forked: ranks inherit what is imported by then.
    import megatron.core.models.gpt.gpt_model  # noqa: F401


@pytest.fixture(autouse=True)
def on_cpu():
    """CUDA entry points substituted for the duration of the test."""
    with testing.megatron_on_cpu():
        yield


@pytest.fixture(scope="session")
def ranks2():
    """Two gloo ranks, forked on first use."""
    with testing.Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks4():
    """Four gloo ranks, forked on first use."""
    with testing.Ranks(4) as ranks:
        yield ranks
