"""Fixtures of the release cells: the megatron-core on PYTHONPATH, on CPU, here or in two or four forked ranks."""

import contextlib
from importlib.util import find_spec

import chosen
import pytest

from shim import testing
from shim.testing.cells import EVERYDAY

# Without a release nothing here can run; run_cells takes a cell without tests for a failure.
if find_spec("megatron") is None or find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import gloo
    import graphs
    import lean_cells

    graphs.run_as_they_are()
    lean_cells.begin(testing.release(), EVERYDAY)
    # Before any rank is forked: ranks inherit what is imported by then.
    import megatron.core.models.gpt.gpt_model  # noqa: F401


def pytest_ignore_collect(collection_path):
    """In `make test` a file runs on the releases that its CELLS names: see chosen.py."""
    return True if chosen.left_out(collection_path, testing.release(), EVERYDAY) else None


def pytest_collection_modifyitems(items, config):
    """Last what gives autograd a thread of its own: no rank that computes a gradient can be forked after that."""
    chosen.keep_part(items, config, testing.release(), EVERYDAY)
    items.sort(key=lambda item: item.get_closest_marker("no_fork_after") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Up to torch 2.8 gloo lacks collectives: a test that needs one says so."""
    try:
        return (yield)
    except Exception as error:
        if gloo.lacks(str(error)):
            pytest.skip(gloo.LACKS.search(str(error))[0])
        raise


@pytest.fixture(autouse=True)
def on_cpu():
    """CUDA entry points substituted for the duration of the test."""
    with testing.megatron_on_cpu():
        yield


@pytest.fixture
def uncompiled(one_rank):
    """No part of a router is compiled, which takes many seconds."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def one_rank(request):
    """A layout of one rank. A test that has ranks of its own gets none: no rank can be forked inside a layout."""
    if "ranks2" in request.fixturenames:
        yield
        return
    with testing.layout_initialised(testing.Layout()):
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


@pytest.fixture(scope="module")
def ranks():
    """Pools of one file, by the number of ranks: forked on first use, with what the file has put in place by then.

    Those above may have been forked by another file, where CUDA is the CPU.
    """
    with contextlib.ExitStack() as open_pools:
        yield {world: open_pools.enter_context(testing.Ranks(world)) for world in (1, 2, 3, 4)}


def pytest_collection_finish():
    chosen.keep_what_is_imported()
