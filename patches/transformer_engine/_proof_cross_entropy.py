"""Transformer Engine's fused cross entropy, for proofs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

from shim.testing.interpreted import interpreted
from shim.testing.proof import CannotRunError


@contextlib.contextmanager
def cross_entropy(device: str) -> Iterator[Any]:
    """Upstream's function; on a CPU with its kernels in Triton's interpreter."""
    if find_spec("transformer_engine.pytorch.cross_entropy") is None:
        raise CannotRunError("this Transformer Engine has no fused cross entropy")
    module: Any = import_module("transformer_engine.pytorch.cross_entropy")
    if device != "cpu":
        yield module.parallel_cross_entropy
        return
    launches = import_module("transformer_engine.pytorch.triton.cross_entropy")
    # From 2.19 it asks for CUDA tensors before anything else.
    with interpreted(launches), mock.patch.object(module, "_validate_inputs", lambda *args: None, create=True):
        yield module.parallel_cross_entropy
