"""Fixtures of the pair cells: the megatron-core and the Transformer Engine on PYTHONPATH, on CPU."""

import functools
import os
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from shim import testing
from shim._matrix.load import load_matrix
from shim.testing.cells import EVERYDAY_PAIRS

# Without both nothing here can run; run_cells takes a cell without tests for a failure.
if any(find_spec(name) is None for name in ("megatron", "transformer_engine", "torch")):
    collect_ignore_glob = ["test_*.py"]
else:
    testing.transformer_engine_on_cpu()
    import megatron.core.models.gpt.gpt_model  # noqa: F401


@functools.cache
def _last_of_each_variant(patch):
    """For each variant of a patch the last everyday pair that gets it; None where there is no such patch."""
    matrix = load_matrix()
    if patch not in matrix.patches:
        return None
    distribution, found = matrix.patches[patch].distribution, {}
    for pair in EVERYDAY_PAIRS:
        core, _, engine = pair.partition("+")
        release = {"megatron-core": core, "transformer-engine": engine}[distribution]
        pin = matrix.pins[distribution][release].get(patch)
        found[pin and pin.variant] = pair
    return set(found.values())


# What a file tests where its name does not say.
_PATCHES = {"fp8-scales": "te-fp8-state", "fp8-scales-alone": "te-fp8-state"}


def pytest_ignore_collect(collection_path):
    """With SHIM_TEST_ONCE_PER_VARIANT=1 a patch's own tests, which are named after it, run once per variant: on the
    last everyday pair that gets it. Everything else, and every other pair, runs all of them."""
    if os.environ.get("SHIM_TEST_ONCE_PER_VARIANT") != "1" or collection_path.suffix != ".py":
        return None
    pair = f"{testing.release()}+{version('transformer_engine')}"
    name = collection_path.stem.removeprefix("test_").replace("_", "-")
    pairs = _last_of_each_variant(_PATCHES.get(name, name))
    return True if pairs and pair in EVERYDAY_PAIRS and pair not in pairs else None


@pytest.fixture(autouse=True)
def on_cpu():
    """CUDA entry points of both substituted for the duration of the test."""
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins():
        yield


def pytest_collection_modifyitems(items):
    """What a pair of these releases cannot do with the patch under test alone."""
    core, engine = (tuple(map(int, version(n).split(".")[:2])) for n in ("megatron-core", "transformer-engine"))
    builds = ("test_mtp_quantized_recompute", "test_decoder_layers", "test_first_and_last_layers")
    for item in items:
        if core == (0, 17) and (2, 5) <= engine <= (2, 9) and any(name in item.nodeid for name in builds):
            item.add_marker(
                pytest.mark.skip(reason="no model can be built without te-cpu-offload, which is tested by itself")
            )
        if engine == (2, 1) and "test_stock_does_not_train_mtp_layers" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="TE 2.1 refuses the bound method that stock passes to it"))
