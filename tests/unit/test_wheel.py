"""The wheel and the source distribution hold everything they need, and work where there is no torch.

`make matrix` runs this on every Python there is (tests/other_pythons.sh).
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from thorough import in_full
from unit_helpers import REPOSITORY, megatron, metadata

import shim


def has_setuptools():
    code = "import pip; from importlib.metadata import version; assert int(version('setuptools').split('.')[0]) >= 78"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True)
    return found.returncode == 0


pytestmark = pytest.mark.skipif(
    not has_setuptools(), reason="building a wheel offline needs pip and setuptools from 78 on"
)


OF_A_COMMIT = {"SOURCE_DATE_EPOCH": "1790000000"}


def pip(*arguments):
    """pip of this Python, offline, with the setuptools that is there."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments[:1], "--quiet", "--disable-pip-version-check", *arguments[1:]],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_NO_INPUT": "1", **OF_A_COMMIT},
    )
    assert done.returncode == 0, done.stdout + done.stderr


OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy without what git ignores: a build writes into its tree, and must not find what lies around in this one."""
    where = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY, capture_output=True
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name and (REPOSITORY / name).exists()]
    else:  # itself unpacked from a source distribution
        names = [
            "setup.py",
            "pyproject.toml",
            "MANIFEST.in",
            "README.md",
            "LICENSE",
            "version_matrix.yaml",
            "version_matrix.lock.json",
        ]
        names += [
            str(p.relative_to(REPOSITORY))
            for d in ("shim", "patches", "maintenance")
            for p in (REPOSITORY / d).rglob("*.*")
        ]
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, where / name)
    return where


def built(form, tree, where, python=sys.executable, **variables):
    """The "sdist" or the "wheel" of the tree, as a build frontend asks setuptools for it."""
    code = f"from setuptools import build_meta; build_meta.build_{form}({str(where)!r})"
    environ = {**os.environ, **OF_A_COMMIT, **variables}
    done = subprocess.run([python, "-c", code], cwd=tree, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = [file for file in where.iterdir() if file.name.endswith((".whl", ".tar.gz"))]
    return archive


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    return built("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """The wheel of the tree."""
    where = tmp_path_factory.mktemp("wheel")
    pip("wheel", *OFFLINE, "--wheel-dir", str(where), str(tree))
    (archive,) = where.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def sdists_wheel(sdist, tmp_path_factory):
    """What pip makes of the source distribution, where it is all that an index offers."""
    where = tmp_path_factory.mktemp("sdists-wheel")
    pip("wheel", *OFFLINE, "--wheel-dir", str(where), str(sdist))
    (archive,) = where.glob("*.whl")
    return archive


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@in_full  # test_the_source_distribution_has_tests_and_documents reads its files
def test_the_source_distribution_builds_the_same_wheel(sdists_wheel, wheel):
    """The matrix, the patches, and the rest."""
    assert sdists_wheel.name == wheel.name and names_in(sdists_wheel) == names_in(wheel)


def test_a_wheel_that_is_not_installed_says_so_in_one_line(wheel, tmp_path):
    """On the path as it is, which Python takes for a zip of modules. shim reads files beside them."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(wheel), "COLUMNS": "1000"}
    command = [sys.executable, "-m", "shim", "plan"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "shim was imported from the archive" in done.stderr and "install the wheel with pip" in done.stderr


@in_full
@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_two_builds_of_a_commit_are_the_same_bytes(form, tree, tmp_path, request):
    """On another day, in another folder, under another umask, by pip and without it; and small."""
    copy = tmp_path / "tree"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "matrix.json")
    shutil.copytree(tree, copy, ignore=ignored, copy_function=shutil.copyfile)
    for file in (file for file in copy.rglob("*") if file.is_file()):
        file.chmod(0o666 & ~0o077)
        os.utime(file, (1_000_000_000, 1_000_000_000))
    (copy / "shim" / "_matrix" / "matrix.json").write_text("left from another build")
    first, second = (file.read_bytes() for file in (request.getfixturevalue(form), built(form, copy, tmp_path)))
    assert first == second
    assert len(first) < {"wheel": 1_700_000, "sdist": 3_200_000}[form]  # a patch takes 6 kB of a wheel


def test_the_source_distribution_has_tests_and_documents(sdist):
    """Of the tree, and none of what building and testing leave in it."""
    assert sdist.name == f"megatron_shim-{shim.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "version_matrix.yaml",
        "version_matrix.lock.json",
        "LICENSE",
        "CHANGELOG.md",
        "SECURITY.md",
        "Makefile",
        "docs/cli.md",
        "patches/megatron_core/rope_thd/proved.json",
        "changes/README.md",
        ".ci/run",
    } <= names
    assert {
        "tests/unit/test_wheel.py",
        "tests/other_pythons.sh",
        "examples/trainer/train.py",
        "maintenance/docs.py",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".yaml.new"))]


def test_the_wheel_holds_matrix_and_patches_inside_the_package(wheel):
    """In the tree they lie beside the package; in the wheel everything is below shim/."""
    assert wheel.name == f"megatron_shim-{shim.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
        for name in ("version_matrix.yaml", "version_matrix.lock.json"):
            assert archive.read(f"shim/{name}") == (REPOSITORY / name).read_bytes()
    wanted = {
        "shim/version_matrix.yaml",
        "shim/version_matrix.lock.json",
        "shim/py.typed",
        "shim/_configs/trainers.yaml",
        "shim/_te/wanted_names.json",
        "shim/_matrix/matrix.json",
        "shim/_releases/known_files.json",
        "shim/_releases/known_trees.json",
    }
    wanted |= {"shim/_te/lost_names.json", "shim/_te/te_remedies.json"}
    for directory, into in (("shim", "shim"), ("patches", "shim/patches")):
        for file in (file for kind in ("*.py", "patch.yaml") for file in (REPOSITORY / directory).rglob(kind)):
            wanted.add(f"{into}/{file.relative_to(REPOSITORY / directory).as_posix()}")
    assert names == wanted


def test_an_installed_wheel_has_the_digest_of_the_tree(wheel, tree, tmp_path):
    """Each part of shim's own code is the same; so a lock that was written in a checkout holds a job with the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import shim._planning.digest as own; print(own.__file__); print(own.own_code(own.own_digests()))"

    def parts(top):
        environ = {**os.environ, "PYTHONPATH": str(top)}
        done = subprocess.run([sys.executable, "-c", code], cwd=top, env=environ, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith(str(top)), done.stderr
        return done.stdout.splitlines()[1]

    assert parts(tmp_path) == parts(tree)


def test_the_wheel_asks_for_packaging_and_pyyaml_only(wheel):
    """torch and megatron-core are the user's; extras name them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    asked = [line.split()[1] for line in text.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert sorted(part.partition(">")[0].lower() for part in asked) == ["packaging", "pyyaml"]


@in_full
def test_a_build_finds_its_requirements_where_the_frontend_put_them(bare, tree, tmp_path):
    """pip isolates a build by PYTHONPATH: its environment has no package itself."""
    python, site = bare
    overlay = tmp_path / "overlay"
    site.rename(overlay)
    site.mkdir()
    here = Path(find_spec("setuptools").submodule_search_locations[0]).parent
    for found in (here / "setuptools", here / "_distutils_hack", *here.glob("setuptools-*.dist-info")):
        (overlay / found.name).symlink_to(found)
    where = tmp_path / "archives"
    where.mkdir()
    built("wheel", tree, where, python, PYTHONPATH=str(overlay))


@pytest.fixture
def bare(tmp_path):
    """A fresh environment that sees packaging and PyYAML, and nothing else of this one: its Python and its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for package in ("packaging", "yaml"):
        (location,) = find_spec(package).submodule_search_locations
        (site / package).symlink_to(location)
    return python, site


@pytest.mark.parametrize("form", ["wheel", pytest.param("sdists_wheel", marks=in_full)])
def test_what_is_installed_plans_without_torch(form, bare, tmp_path, request):
    """By both names of the command, and as a module."""
    python, site = bare
    pip("install", *OFFLINE, "--target", str(site), str(request.getfixturevalue(form)))
    root = megatron(tmp_path / "release", "0.16.0")
    metadata(root, "0.16.0")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEGATRON_SHIM_"))}

    def run(*command, **variables):
        return subprocess.run(
            [python, *command], capture_output=True, text=True, cwd=tmp_path, env={**environ, **variables}
        )

    for program in (["-m", "shim"], [site / "bin" / "shim"], [site / "bin" / "megatron-shim"]):
        done = run(*program, "plan", PYTHONPATH=str(root))
        assert done.returncode == 0, done.stderr
        assert "megatron-core 0.16.0" in done.stdout and "\n  torch " not in done.stdout
        assert "mtp-packed-sequences" in done.stdout
    for command in (["pin", "--releases"], ["pin", "--check"], ["new-patch", "new-fix", "--target", "a:b"]):
        done = run("-m", "shim", *command)
        assert done.returncode == 2 and "needs a source checkout" in done.stderr, done.stderr
    code = (
        "import shim, sys; from shim._matrix.load import load_matrix, matrix_path; load_matrix(); shim.explain("
        "'mtp-packed-sequences'); print(shim.__file__, matrix_path()); assert 'torch' not in sys.modules"
    )
    done = run("-c", code)
    assert done.stdout.split() == [f"{site}/shim/__init__.py", f"{site}/shim/version_matrix.yaml"], done.stderr


def test_the_index_gets_no_link_that_leads_nowhere(wheel):
    """README's links are relative, for a checkout; a package index renders the text elsewhere."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    assert "Are you affected?" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all(link.startswith(("https://", "#")) for link in links), links


def test_with_an_address_each_link_leads_to_a_file_of_the_repository(monkeypatch):
    """docs/releasing.md asks for the address, and the description of the package then has all of README's links."""
    spec = spec_from_file_location("setup_of_shim", REPOSITORY / "setup.py")
    setup = module_from_spec(spec)
    spec.loader.exec_module(setup)
    monkeypatch.setattr(setup, "PROJECT", "https://example.test/shim")
    links = re.findall(r"\]\(([^)]+)\)", setup.readme())
    assert all(link.startswith(("https://example.test/shim", "#")) for link in links), links
    paths = [link.partition("/blob/main/")[2].partition("#")[0] for link in links if "/blob/main/" in link]
    assert "docs/patches/frozen-recompute.md" in paths and all((REPOSITORY / path).is_file() for path in paths)
