"""Fixtures of the pair cells: the megatron-core and the Transformer Engine on PYTHONPATH, on CPU."""

from importlib.metadata import version
from importlib.util import find_spec

import chosen
import pytest

from shim import testing
from shim.testing.cells import EVERYDAY_PAIRS


def pair():
    return f"{testing.release()}+{version('transformer_engine')}"


# Without both nothing here can run; run_cells takes a cell without tests for a failure.
if any(find_spec(name) is None for name in ("megatron", "transformer_engine", "torch")):
    collect_ignore_glob = ["test_*.py"]
else:
    import graphs
    import lean_cells

    graphs.run_as_they_are()
    testing.transformer_engine_on_cpu()
    lean_cells.begin(pair(), EVERYDAY_PAIRS)
    import megatron.core.models.gpt.gpt_model  # noqa: F401


def pytest_ignore_collect(collection_path):
    """In `make test` a file runs on the pairs that its CELLS names: see chosen.py."""
    return True if chosen.left_out(collection_path, pair(), EVERYDAY_PAIRS) else None


@pytest.fixture(autouse=True)
def on_cpu():
    """CUDA entry points of both substituted for the duration of the test."""
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins():
        yield


def pytest_collection_modifyitems(items, config):
    """What a pair of these releases cannot do with the patch under test alone."""
    chosen.keep_part(items, config, pair(), EVERYDAY_PAIRS)
    releases = testing.release(), version("transformer-engine")
    core, engine = (tuple(int(part) for part in release.split(".")[:2]) for release in releases)
    builds = ("test_mtp_quantized_recompute", "test_decoder_layers", "test_first_and_last_layers")
    for item in items:
        if core == (0, 17) and (2, 5) <= engine <= (2, 9) and any(name in item.nodeid for name in builds):
            item.add_marker(
                pytest.mark.skip(reason="no model can be built without te-cpu-offload, which is tested by itself")
            )
        if engine <= (2, 2) and "test_stock_does_not_train_mtp_layers" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="TE up to 2.2 refuses the bound method that stock passes to it"))


def pytest_collection_finish():
    chosen.keep_what_is_imported()
