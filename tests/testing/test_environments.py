"""Environments with another torch on another Python: made, shared and used, with a pip that only records."""

import subprocess
import sys
from pathlib import Path

import pytest

from shim.maintenance import other_torch
from shim.maintenance.environments import AXIS
from shim.maintenance.other_torch import Environment, interpreter, is_at_hand, made, needs
from shim.testing.cells import source_tree
from shim.testing.releases import FetchError

TREE = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
OLD = Environment("2.9.1", HERE)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Replaces venv and pip. The interpreter of a made environment is a link to this one."""
    monkeypatch.setenv("MEGATRON_SHIM_CACHE", str(tmp_path / "cache"))
    real, calls = subprocess.run, []

    def run(command, **kwargs):
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        elif "pip" in command:
            calls.append(command[command.index("install") + 1 :])
        else:
            return real(command, **kwargs)
        assert "PYTHONPATH" not in kwargs["env"]
        failed = run.says if "pip" in command else ""
        return subprocess.CompletedProcess(command, bool(failed), "", failed)

    run.says, run.calls = "", calls
    monkeypatch.setattr(other_torch.subprocess, "run", run)
    return run


def test_an_environment_is_made_once_and_completed_if_something_new_is_needed(pip, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/another/python")
    said = []
    assert not is_at_hand(OLD)
    python = made(OLD, ["pytest"], said.append)
    assert python.exists() and is_at_hand(OLD)
    assert said == [f"making the environment of torch 2.9.1 on Python {HERE}"]
    assert "torch==2.9.1" in pip.calls[0] and {"pytest", "numpy<2.4", "--no-cache-dir"} <= set(pip.calls[0])
    assert made(OLD, ["pytest"], said.append) == python and len(pip.calls) == 1
    made(OLD, ["pytest", "einops"], said.append)
    assert "einops" in pip.calls[1] and len(said) == 1


def test_numpy_is_held_back_only_for_a_triton_that_cannot_read_it(pip):
    made(Environment("2.14.1", HERE), [], str)
    assert not [one for one in pip.calls[0] if "numpy" in one]


def test_an_environment_that_pip_could_not_fill_is_tried_again(pip):
    pip.says = "ERROR: no matching distribution"
    with pytest.raises(FetchError, match=r"torch 2.9.1 on Python .*\n.*no matching distribution\n.*constraint"):
        made(OLD, [], str)
    assert not is_at_hand(OLD)
    pip.says = ""
    assert made(OLD, [], str).exists() and len(pip.calls) == 2


def test_a_python_that_is_not_there_is_told(pip):
    with pytest.raises(FetchError, match=r"no Python 3\.99 for torch 2\.9\.1 on Python 3\.99: put python3\.99"):
        made(Environment("2.9.1", "3.99"), [], str)


def test_an_interpreter_is_of_its_version(tmp_path, monkeypatch):
    assert interpreter(HERE) is not None
    wrong = tmp_path / "versions" / "3.99.1" / "bin" / "python"
    wrong.parent.mkdir(parents=True)
    wrong.symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert interpreter("3.99") is None


def test_requirements_are_those_of_the_tests_without_torch(tmp_path):
    found = needs(TREE / "tests" / "requirements.txt")
    assert "pytest>=8" in found and not [line for line in found if line.startswith(("torch", "triton", "#"))]
    file = tmp_path / "requirements.txt"
    file.write_text("# a word\ntorch==2.13.0\ntorch\ntriton >= 3\ntorchvision\neinops  # for TE\n\n")
    assert needs(file) == ["torchvision", "einops"]


def test_the_axis_begins_at_the_lowest_torch_that_an_installation_may_have():
    text = (TREE / "pyproject.toml").read_text("utf-8")
    assert f'"torch>={AXIS[0].torch.rpartition(".")[0]}"' in text
    assert sorted({one.python for one in AXIS}) == ["3.10", "3.11", "3.12", "3.13"]
    assert source_tree() == TREE


# ---- cells in them


CELL = """
import os, shim
def test_where(): assert "fake" not in os.environ["PYTHONPATH"] and shim.__file__.startswith(TREE)
"""


def test_cells_run_in_the_environment_with_shim_from_its_tree(pip, tmp_path, capsys):
    file, requirements = tmp_path / "test_one.py", tmp_path / "requirements.txt"
    file.write_text(CELL.replace("TREE", repr(str(TREE))))
    requirements.write_text("torch\npytest\n")
    asked = ["--torch", "2.9.1", "--python", HERE, "--releases", "torch", "--requirements", str(requirements)]
    assert other_torch.main([*asked, "--if-made", "--", "-q", str(file)]) == 0
    assert "skipped: torch 2.9.1 on Python" in capsys.readouterr().out
    assert other_torch.main([*asked, "--", "-q", "-p", "no:cacheprovider", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"torch 2.9.1 on Python {HERE}:" in out and "torch          passed          1 cases" in out
    assert (tmp_path / "cache" / "logs" / OLD.name / "torch.log").exists()


def test_an_environment_that_cannot_be_made_fails(pip, capsys):
    pip.says = "ERROR: no matching distribution"
    assert other_torch.main(["--torch", "2.9.1", "--releases", "torch", "--", "-q"]) == 1
    assert "no matching distribution" in capsys.readouterr().out
