"""Releases without network, torch or megatron: pip is a stand-in that copies a tiny wheel."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from packaging.version import Version
from tiny_wheels import write_wheel

from shim._matrix.load import load_matrix
from shim.testing import FetchError, cache_dir, environment, fetch, releases

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("supported", [releases.RELEASES, releases.TE_RELEASES], ids=["megatron-core", "engines"])
def test_the_supported_releases_are_sorted(supported):
    assert len(supported) > 20
    assert list(supported) == sorted(set(supported), key=Version)


def test_the_commits_of_the_matrix_can_be_fetched_by_name():
    assert set(releases.COMMITS) == set(load_matrix().commits["megatron-core"])


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("MEGATRON_SHIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "megatron-shim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "megatron-shim"


def test_fetch_downloads_once(pip):
    said = []
    directory = fetch("0.16.1", progress=said.append)
    assert (directory / "fake_core" / "__init__.py").read_text() == "VERSION = '0.16.1'\n"
    assert fetch("0.16.1", progress=said.append) == directory
    assert len(pip.calls) == 1 and said == ["fetching megatron-core 0.16.1"]
    for option in ("--no-deps", "--ignore-requires-python", "--only-binary"):
        assert option in pip.calls[0]


def test_an_unpacked_release_without_its_marker_is_made_again(pip):
    directory = fetch("0.16.1")
    (directory / ".complete").unlink()
    (directory / "fake_core" / "__init__.py").unlink()
    assert fetch("0.16.1") == directory
    assert (directory / "fake_core" / "__init__.py").exists()
    assert len(pip.calls) == 1  # the wheel was still there


def test_a_wheel_put_there_by_hand_needs_no_network(pip, cache):
    wheels = cache / "megatron-core" / "wheels"
    wheels.mkdir(parents=True)
    write_wheel(wheels / "megatron_core-0.19.2-cp311-cp311-linux_x86_64.whl", "0.19.2")
    assert (fetch("0.19.2") / "fake_core").is_dir()
    assert not pip.calls


def test_a_release_is_not_taken_for_its_post_release(pip, cache):
    wheels = cache / "transformer-engine" / "wheels"
    wheels.mkdir(parents=True)
    for version in ("2.6.0.post1", "2.6.0"):
        write_wheel(wheels / f"transformer_engine-{version}-py3-none-any.whl", version, "fake_engine")
    for version in ("2.6.0", "2.6.0.post1"):
        found = fetch(version, "transformer-engine") / "fake_engine" / "__init__.py"
        assert found.read_text() == f"VERSION = '{version}'\n"
    (wheels / "transformer_engine-2.6.0-py3-none-any.whl").unlink()
    (cache / "transformer-engine" / "2.6.0" / ".complete").unlink()
    fetch("2.6.0", "transformer-engine")
    assert pip.calls[0][-1] == "transformer-engine==2.6.0"


def test_a_failed_download_says_what_to_do_and_leaves_nothing(pip, cache):
    pip.fails = True
    with pytest.raises(FetchError, match="no matching distribution") as caught:
        fetch("0.16.1")
    assert "put the wheel into" in str(caught.value)
    assert str(cache / "megatron-core" / "wheels") in str(caught.value)
    assert not [path for path in (cache / "megatron-core").iterdir() if path.name.startswith((".0", "0"))]


def test_a_failed_download_names_the_newest_versions_only(pip):
    """pip lists every nightly, which buries what to do."""
    pip.fails = True
    for count, shown in (
        (3, "0.0, 0.1, 0.2"),
        (5, "0.0, 0.1, 0.2, 0.3, 0.4"),
        (200, "..., 0.195, 0.196, 0.197, 0.198, 0.199"),
    ):
        versions = ", ".join(f"0.{number}" for number in range(count))
        pip.says = f"ERROR: could not find megatron-core==9.9 (from versions: {versions})\nERROR: none found"
        with pytest.raises(FetchError) as caught:
            fetch("9.9")
        assert f"(from versions: {shown})\nERROR: none found\n" in str(caught.value)


def test_two_at_once_both_get_it(pip):
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch("0.14.0"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert (found[0] / "fake_core" / "__init__.py").exists()


def test_the_environment_of_a_cell():
    base = {"PYTHONPATH": "/before", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/home"}
    env = environment("/release", base)
    assert env["PYTHONPATH"].split(":") == ["/release", "/before"]
    assert env["OMP_NUM_THREADS"] == "1" and env["NO_VCS_VERSION"] == "1" and env["HOME"] == "/home"
    assert "PYTHONDONTWRITEBYTECODE" not in env and "PYTHONDONTWRITEBYTECODE" in base
    assert env["TORCH_CUDA_ARCH_LIST"] == "8.0+PTX"
    env = environment([Path("/core"), "/engine"], base)
    assert env["PYTHONPATH"].split(":") == ["/core", "/engine", "/before"]


def test_importing_the_package_imports_no_torch():
    code = "import sys, shim.testing, shim.testing.cells; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
