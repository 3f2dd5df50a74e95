"""The built wheel holds everything it needs, and works where there is no torch."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from unit_helpers import REPOSITORY, megatron, metadata

import shim


def has_setuptools():
    found = subprocess.run([sys.executable, "-c", "import setuptools.command.bdist_wheel, pip"], capture_output=True)
    return found.returncode == 0


pytestmark = pytest.mark.skipif(
    not has_setuptools(), reason="building a wheel offline needs pip and setuptools from 70.1 on"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the tree, offline, with the setuptools that is there."""
    where = tmp_path_factory.mktemp("wheel")
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "version_matrix.yaml", "shim", "patches"]
    (where / "tree").mkdir()
    for name in names:
        # A build writes into its tree; shared trees must not see that.
        subprocess.run(["cp", "-R", str(REPOSITORY / name), str(where / "tree" / name)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(where), str(where / "tree")],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_NO_INPUT": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = where.glob("*.whl")
    return built


def test_the_wheel_holds_matrix_and_patches_inside_the_package(wheel):
    """In the tree they lie beside the package; in the wheel everything is below shim/."""
    assert wheel.name == f"megatron_shim-{shim.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
        assert archive.read("shim/version_matrix.yaml") == (REPOSITORY / "version_matrix.yaml").read_bytes()
    wanted = {"shim/version_matrix.yaml", "shim/py.typed", "shim/wanted_names.json"}
    wanted |= {"shim/lost_names.json", "shim/te_remedies.json"}
    for directory, into in (("shim", "shim"), ("patches", "shim/patches")):
        for file in (REPOSITORY / directory).rglob("*.py"):
            wanted.add(f"{into}/{file.relative_to(REPOSITORY / directory).as_posix()}")
    assert names == wanted


def test_the_wheel_asks_for_packaging_and_pyyaml_only(wheel):
    """torch and megatron-core are the user's; extras name them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    asked = [line.split()[1] for line in text.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert sorted(part.partition(">")[0].lower() for part in asked) == ["packaging", "pyyaml"]


def test_an_installed_wheel_plans_without_torch(wheel, tmp_path):
    """In a bare environment that sees nothing but the wheel, packaging and PyYAML."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True)
    for package in ("packaging", "yaml"):
        (location,) = find_spec(package).submodule_search_locations
        Path(site, package).symlink_to(location)
    root = megatron(tmp_path / "release", "0.16.0")
    metadata(root, "0.16.0")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEGATRON_SHIM_"))}
    for program in (["-m", "shim"], [str(Path(site, "bin", "shim"))]):
        done = subprocess.run(
            [python, *program, "plan"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**environ, "PYTHONPATH": str(root)},
        )
        assert done.returncode == 0, done.stderr
        assert "megatron-core 0.16.0" in done.stdout and "torch" not in done.stdout
        assert "drifted       mtp-packed-sequences" in done.stdout
    code = (
        "import shim, sys; from shim._matrix import load_matrix, matrix_path; load_matrix(); shim.explain("
        "'mtp-packed-sequences'); print(shim.__file__, matrix_path()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.stdout.split() == [f"{site}/shim/__init__.py", f"{site}/shim/version_matrix.yaml"], done.stderr
