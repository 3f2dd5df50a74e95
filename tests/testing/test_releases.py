"""Releases and cells without network, torch or megatron: pip is a stand-in that copies a tiny wheel."""

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from shim.testing import FetchError, cache_dir, cells, environment, fetch, releases


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch):
    """Replaces the run of pip; `pip.calls` are its command lines, `pip.fails` makes it fail."""
    real = subprocess.run

    class Pip:
        calls: list[list[str]] = []
        fails = False

        def __call__(self, command, **kwargs):
            if "pip" not in command:
                return real(command, **kwargs)
            self.calls.append(command)
            if self.fails:
                return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution")
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


def write_wheel(path, version, package="fake_core"):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", f"VERSION = {version!r}\n")


def test_the_supported_releases_are_nineteen_and_sorted():
    numbers = [tuple(map(int, release.split("."))) for release in releases.RELEASES]
    assert len(numbers) == 19 and numbers == sorted(set(numbers))
    assert set(cells.EVERYDAY) <= set(releases.RELEASES)


def test_the_engines_are_twenty_four_and_sorted():
    def number(release):
        return tuple(int(part.removeprefix("post")) for part in release.split("."))

    assert len(releases.TE_RELEASES) == 24
    assert list(releases.TE_RELEASES) == sorted(set(releases.TE_RELEASES), key=number)


def test_pairs_are_of_supported_releases():
    assert set(cells.EVERYDAY_PAIRS) < set(cells.ALL_PAIRS)
    assert len(cells.ALL_PAIRS) == len(set(cells.ALL_PAIRS)) > 9 * 13
    for pair in cells.ALL_PAIRS:
        core, engine = pair.split("+")
        assert core in releases.RELEASES and engine in releases.TE_RELEASES


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
    env = environment([Path("/core"), "/engine"], base)
    assert env["PYTHONPATH"].split(":") == ["/core", "/engine", "/before"]


def test_importing_the_package_imports_no_torch():
    code = "import sys, shim.testing, shim.testing.cells; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


CELL = """
import fake_core, pytest
def test_ok(): assert fake_core.VERSION
def test_release(): assert fake_core.VERSION != "0.13.0", "broken here"
@pytest.mark.skipif(fake_core.VERSION != "0.12.0", reason="")
def test_only_there(): pass
"""


@pytest.fixture
def cell(tmp_path):
    file = tmp_path / "test_cell.py"
    file.write_text(CELL)
    return ["-q", "-p", "no:cacheprovider", str(file)]


def test_cells_print_one_line_each_and_fail_together(pip, cell, capsys, tmp_path):
    assert cells.run_cells(["0.12.0", "0.13.0"], cell, jobs=2, log_dir=tmp_path / "logs") == 1
    printed = capsys.readouterr().out
    assert [line.split()[:4] for line in sorted(printed.splitlines()) if line.endswith(" s")] == [
        ["0.12.0", "passed", "3", "cases"],
        ["0.13.0", "failed", "2", "cases"],
    ]
    assert "broken here" in printed
    assert "3 passed" in (tmp_path / "logs" / "0.12.0.log").read_text()


def test_cells_that_pass_return_zero(pip, cell, capsys):
    assert cells.main(["--releases", "0.12.0, 0.14.0", "--jobs", "1", "--", *cell]) == 0
    assert capsys.readouterr().out.count("passed") == 2


def test_a_cell_without_a_test_fails(pip, cell, capsys):
    assert cells.run_cells(["0.14.0"], [*cell, "-k", "only_there"]) == 1
    assert cells.run_cells(["0.14.0"], [*cell, "-k", "no_such_test"]) == 1
    assert capsys.readouterr().out.count("no test ran") == 4


def test_a_cell_that_cannot_be_fetched_fails_with_the_reason(pip, cell, capsys):
    pip.fails = True
    assert cells.run_cells(["0.14.0"], cell) == 1
    assert "no matching distribution" in capsys.readouterr().out


@pytest.fixture
def pair(tmp_path):
    """Passes where exactly the parts of the cell's name can be imported."""
    file = tmp_path / "test_pair.py"
    file.write_text(PAIR)
    return ["-q", "-p", "no:cacheprovider", str(file)]


PAIR = """
from importlib import import_module
from importlib.util import find_spec
def test_found():
    found = {name: import_module(name).VERSION for name in ("fake_core", "fake_engine") if find_spec(name)}
    raise AssertionError(f"found {found}")
"""


@pytest.mark.parametrize(
    "cell, found",
    [
        ("0.15.3", {"fake_core": "0.15.3"}),
        ("0.15.3+2.9.0", {"fake_core": "0.15.3", "fake_engine": "2.9.0"}),
        ("+2.6.0.post1", {"fake_engine": "2.6.0.post1"}),
    ],
)
def test_a_cell_runs_on_what_its_name_says(pip, pair, capsys, tmp_path, cell, found):
    assert cells.main(["--releases", cell, "--logs", str(tmp_path / "logs"), "--", *pair]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(cell) and f"found {found}" in printed
    assert (tmp_path / "logs" / f"{cell}.log").exists()


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], cells.EVERYDAY),
        (["--everyday"], cells.EVERYDAY),
        (["--all"], releases.RELEASES),
        (["--everyday-pairs"], cells.EVERYDAY_PAIRS),
        (["--all-pairs"], cells.ALL_PAIRS),
    ],
)
def test_the_options_choose_the_cells(monkeypatch, options, expected):
    ran = []
    monkeypatch.setattr(cells, "run_cells", lambda chosen, *_: ran.append(tuple(chosen)) or 0)
    assert cells.main([*options, "--", "tests"]) == 0
    assert ran == [expected]
