"""A cache of one's own, and a stand-in for pip that copies a tiny wheel."""

import subprocess
from pathlib import Path

import pytest
from tiny_wheels import write_wheel

from shim.testing import releases


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache, monkeypatch):
    """Replaces the run of pip; `pip.calls` are its command lines, `pip.fails` makes it fail."""
    real = subprocess.run

    class Pip:
        calls: list[list[str]] = []
        fails = False
        says = "ERROR: no matching distribution"

        def __call__(self, command, **kwargs):
            if "pip" not in command:
                return real(command, **kwargs)
            self.calls.append(command)
            if self.fails:
                return subprocess.CompletedProcess(command, 1, "", self.says)
            into = Path(command[command.index("--dest") + 1])
            into.mkdir(parents=True)
            name, _, version = command[-1].partition("==")
            package = "fake_engine" if name == "transformer-engine" else "fake_core"
            write_wheel(into / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", version, package)
            return subprocess.CompletedProcess(command, 0, "", "")

    stand_in = Pip()
    stand_in.calls = []
    monkeypatch.setattr(releases.subprocess, "run", stand_in)
    return stand_in
