"""pytest -p dry: tests/gpu without a GPU, up to the first kernel that each test calls.

Torch's device is pretended (shim.testing.pretend_cuda). Each function of Transformer Engine's extension that would
launch something ends the test there. The extension is the real one if its core is installed, as in gpu/bundle, else the
stand-in of shim.testing. A test is green if it has come that far, or has passed or skipped before. What a test does
behind its first kernel is for a GPU to show.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions
from typing import Any
from unittest import mock

import pytest
import torch

from shim.testing import pretend_cuda
from shim.testing.pretend_cuda.state import State
from shim.testing.transformer_engine import CompiledOpError, transformer_engine_on_cpu

EXTENSION = "transformer_engine_torch"
# Of the extension, what launches nothing.
ASKED = ("get_", "device_supports_", "is_", "ubuf_")
called: list[str] = []


def pytest_configure() -> None:
    """Put stand-ins in front of the kernels, also where modules of Transformer Engine have copied their names."""
    real = any("-cu" in name.replace("_", "-") for name in packages_distributions().get("transformer_engine", ()))
    if not real:
        transformer_engine_on_cpu()
    with pretend_cuda.cuda_pretended():
        import_module("transformer_engine.pytorch")
    # This gives a tensor another storage instead of copying, which the pretended device cannot.
    _replace(import_module("transformer_engine.pytorch.module._common").noop_cat, torch.cat)
    extension = import_module(EXTENSION)
    for name, function in list(vars(extension).items()):
        if isinstance(function, types.BuiltinFunctionType) and not name.startswith(ASKED):
            _replace(function, _kernel(name))
    if not real:
        extension.__file__ = "a stand-in"  # tests/gpu/conftest.py skips without a file
    _note_each_error()
    print(f"DRY the extension is {'real' if real else 'a stand-in'}")


def _kernel(name: str) -> Any:
    def reached(*args: Any, **kwargs: Any) -> None:
        raise CompiledOpError(name)

    return reached


def _replace(function: Any, stand_in: Any) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformer_engine"):
            for name, value in list(vars(module).items()):
                if value is function:
                    setattr(module, name, stand_in)


def _note_each_error() -> None:
    made = CompiledOpError.__init__

    def noted(self: CompiledOpError, name: str) -> None:
        called.append(name)
        made(self, name)

    CompiledOpError.__init__ = noted


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems() -> Iterator[None]:
    """tests/gpu/conftest.py asks for a GPU here."""
    with pretend_cuda.cuda_pretended():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    called.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """In the middle of fixtures, so that what they undo is undone on the pretended device as well."""
    marker = item.get_closest_marker("gpu")
    with contextlib.ExitStack() as undo:
        undo.enter_context(pretend_cuda.cuda_pretended())
        undo.enter_context(mock.patch("torch.cuda.set_sync_debug_mode"))
        if marker and not marker.kwargs.get("engine", True):
            undo.enter_context(_first_launch_ends_it())
        try:
            return (yield)
        except BaseException as error:
            if called and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                return None
            raise


@contextlib.contextmanager
def _first_launch_ends_it() -> Iterator[None]:
    """For tests without Transformer Engine: their first kernel is torch's or Triton's, or in a process of its own."""

    def count(self: State, name: str, what: str, number: int = 1) -> None:
        if name == "launches":
            raise CompiledOpError(what)

    def run(command: Sequence[str], **options: Any) -> None:
        raise CompiledOpError(" ".join(command[1:3]))

    with pretend_cuda.counted(), mock.patch.object(State, "count", count), mock.patch("subprocess.run", run):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
    report = yield
    report.end = f"reached {called[0]}" if called else "ran to its end"
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if report.when == "call" and report.passed:
        return "passed", ".", f"PASSED ({report.end})"
    return None
