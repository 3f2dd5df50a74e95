"""Fixtures of the pair cells: the megatron-core and the Transformer Engine on PYTHONPATH, on CPU."""

from importlib.util import find_spec

import pytest

from shim import testing

# Without both nothing here can run; run_cells takes a cell without tests for a failure.
if any(find_spec(name) is None for name in ("megatron", "transformer_engine", "torch")):
    collect_ignore_glob = ["test_*.py"]
else:
    testing.transformer_engine_on_cpu()
    import megatron.core.models.gpt.gpt_model  # noqa: F401


@pytest.fixture(autouse=True)
def on_cpu():
    """CUDA entry points of both substituted for the duration of the test."""
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins():
        yield
