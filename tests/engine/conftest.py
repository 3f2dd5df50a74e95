"""Gives every test a fake world of its own."""

import pytest
from fake_world import World, fresh_engine
from own_process import tree_with_patches
from untraced import pytest_runtest_call  # noqa: F401 - a hook


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A megatron-core 9.9.0 that is not installed anywhere else, without patches so far."""
    with fresh_engine(monkeypatch):
        yield World(tmp_path, monkeypatch)


@pytest.fixture
def patched_world(world):
    """The world with one patch, `count`, that wraps a function in `ops` and a method in `layers`."""
    world.patch("count", ["megatron.core.ops:double", "megatron.core.layers:Layer.forward"])
    return world


@pytest.fixture
def tree(tmp_path):
    """A world with two patches, for other processes."""
    return tree_with_patches(tmp_path / "tree")
