"""Tests on a real GPU with a real Transformer Engine; anywhere else they are collected, and skipped with a reason."""

from importlib import import_module
from importlib.util import find_spec

import pytest

# megatron-core looks for Transformer Engine when it is imported, so no stand-in for it may be made in this process.
ENGINE, EXTENSION = "transformer_engine", "transformer_engine_torch"


def _missing() -> str | None:
    """What keeps these tests from running here."""
    for name in ("torch", "megatron", ENGINE):
        if find_spec(name) is None:
            return f"{name} is not installed"
    if not import_module("torch").cuda.is_available():
        return "no CUDA device"
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


MISSING = _missing()


def pytest_collection_modifyitems(items):
    # Called with the items of all directories.
    for item in items:
        if MISSING and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=MISSING))
