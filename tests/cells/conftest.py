"""Fixtures of the release cells: the megatron-core on PYTHONPATH, on CPU, here or in two or four forked ranks."""

import functools
import os
from importlib.util import find_spec

import pytest
from packaging.version import Version

from shim import testing
from shim._matrix.load import load_matrix

# Without a release nothing here can run; run_cells takes a cell without tests for a failure.
if find_spec("megatron") is None or find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before any rank is forked: ranks inherit what is imported by then.
    import megatron.core.models.gpt.gpt_model  # noqa: F401


@functools.cache
def _newest_of_each_variant():
    """Patch id -> for each of its variants (None: the release is right by itself) the newest release that gets it."""
    matrix = load_matrix()
    newest = {id: {} for id in matrix.patches}
    for release in sorted(matrix.pins["megatron-core"], key=Version):
        for id, pin in matrix.pins["megatron-core"][release].items():
            newest[id][pin.variant] = release
    return {id: set(releases.values()) for id, releases in newest.items()}


def pytest_ignore_collect(collection_path):
    """With SHIM_TEST_ONCE_PER_VARIANT=1 a patch's own tests, which are named after it, run once per variant: on the
    newest release that gets it. Everything else runs on every release."""
    if os.environ.get("SHIM_TEST_ONCE_PER_VARIANT") != "1" or collection_path.suffix != ".py":
        return None
    name = collection_path.stem.removeprefix("test_").replace("_", "-")
    newest = _newest_of_each_variant()
    patch = max((id for id in newest if name == id or name.startswith(f"{id}-")), key=len, default=None)
    return True if newest.get(patch) and testing.release() not in newest[patch] else None


def pytest_collection_modifyitems(items):
    """Last what gives autograd a thread of its own: no rank that computes a gradient can be forked after that."""
    items.sort(key=lambda item: item.get_closest_marker("no_fork_after") is not None)


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
