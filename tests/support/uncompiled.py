"""Layouts in which no part of a router is compiled, because that takes many seconds."""

import contextlib

import torch

from shim import testing


@contextlib.contextmanager
def inside(layout):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), torch.compiler.set_stance("force_eager"):
        yield
