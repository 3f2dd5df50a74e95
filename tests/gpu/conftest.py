"""Tests on a real GPU, most with a real Transformer Engine; elsewhere they are collected, and skipped with a reason.

Those that need torch and Triton only are marked gpu(engine=False).
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import pytest

# megatron-core looks for Transformer Engine when it is imported, so no stand-in for it may be made in this process.
ENGINE, EXTENSION = "transformer_engine", "transformer_engine_torch"


@cache
def _missing(engine: bool) -> str | None:
    """What keeps tests with or without Transformer Engine from running here."""
    for name in ("torch", "megatron", ENGINE) if engine else ("torch", "triton"):
        if find_spec(name) is None:
            return f"{name} is not installed"
    if not import_module("torch").cuda.is_available():
        return "no CUDA device"
    if not engine:
        return None
    try:
        import_module(f"{ENGINE}.pytorch")
        extension = import_module(EXTENSION)
    except Exception as error:  # its libraries may be missing, of another CUDA, or built for another torch
        return f"{ENGINE} cannot be imported: {error}"
    if getattr(extension, "__file__", None) is None:
        return f"{EXTENSION} is a stand-in"
    try:
        import_module("megatron.core.tensor_parallel.random")
    except ImportError as error:
        return f"megatron-core cannot be imported: {error}"
    return None


def pytest_collection_modifyitems(items):
    # Called with the items of all directories.
    for item in items:
        marker = item.get_closest_marker("gpu")
        missing = marker and _missing(marker.kwargs.get("engine", True))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
