"""Fixtures of the unit tests: no torch, no megatron, no network; small fake packages stand in for releases."""

import importlib
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from audit_cases import examiner, verdicts_of
from edited_trees import tree  # noqa: F401 - a fixture
from unit_helpers import World
from untraced import pytest_runtest_call  # noqa: F401 - a hook

from shim import _api
from shim._matrix import load as _matrix
from shim._matrix import rules as _rules  # noqa: F401 - imports yaml, which on_path takes off the path


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No MEGATRON_SHIM_ variable of whoever runs the tests counts."""
    for name in [name for name in os.environ if name.startswith("MEGATRON_SHIM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_release_loaded():
    """No fake release stays in sys.modules, where it would be what is installed for the next test."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "trainer_patches")]:
        del sys.modules[name]


@pytest.fixture
def on_path(monkeypatch):
    """Makes the given directories, and the standard library, all there is on sys.path."""

    def only(*directories):
        standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib"), "lib-dynload"))]
        monkeypatch.setattr(sys, "path", [*map(str, directories), *standard])
        importlib.invalidate_caches()

    return only


@pytest.fixture
def world(tmp_path, on_path, monkeypatch):
    """Fake releases, a matrix about them, whose modules are trusted, and a place to install one."""
    # What a matrix of one's own takes is said by test_trust.py; here it need not be said each time.
    monkeypatch.setattr(_matrix, "TRUSTED", (*_matrix.TRUSTED, "trainer_patches"))
    monkeypatch.setattr(_api, "_of_another_matrix", lambda matrix: [])
    return World(tmp_path, on_path)


@pytest.fixture
def examine(world):
    return examiner(world)


@pytest.fixture
def verdicts(examine, tmp_path):
    return verdicts_of(examine, tmp_path)
