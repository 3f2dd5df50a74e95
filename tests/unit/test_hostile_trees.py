"""An audit survives whatever a tree or a wheel holds: none of its code runs, and time and memory stay bounded."""

import os
import subprocess
import sys
import zipfile

import pytest
from unit_helpers import BROKEN, REPOSITORY, megatron, write_file

from shim._archives.trees import open_tree
from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._releases.sources import MAX_SOURCE_BYTES
from shim._te import names as _wanted
from shim._tools.audit import audit
from shim._tools.audit_report import as_markdown, as_text
from shim._tools.cli import main
from shim.testing.patience import patience

MEMORY = 600  # MB that a process with nothing but an audit in it may take
METADATA = "megatron_core-0.16.0.dist-info/METADATA"


@pytest.fixture
def examine(world):
    """Audit what lies at a place, in every form; known releases are the fake ones."""

    def known(distribution, release):
        return world.root / "releases" / release

    def run(target):
        found = audit(load_matrix(world.matrix), open_tree(str(target), known), known)
        assert as_text(found) and as_markdown(found) and found.to_dict()
        return {finding.id: finding for finding in found.findings}

    return run


def files_of(root):
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in root.rglob("*") if f.is_file()}


@pytest.fixture
def wheel(tmp_path):
    """A wheel with the fake megatron-core 0.16.0 and with other members, after `change` of the bytes."""

    def make(members=(), change=None, **arguments):
        files = files_of(megatron(tmp_path / "wheeled", "0.16.0", {"roll.py": BROKEN}))
        files[METADATA] = b"Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.0\n"
        files |= dict(members)
        path = tmp_path / "megatron_core-0.16.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", **{"compression": zipfile.ZIP_DEFLATED, **arguments}) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        if change is not None:
            path.write_bytes(change(path.read_bytes()))
        return path

    return make


# No code runs

SPITE = """
    import os, pathlib
    pathlib.Path({marker!r}).touch()
    os._exit(77)
"""


def test_no_code_of_the_tree_runs_and_nothing_of_it_is_imported(world, tmp_path, monkeypatch):
    """Not from within it either: with modules named like those that shim, pip and Python import."""
    marker = tmp_path / "ran"
    spite = SPITE.format(marker=str(marker))
    root = megatron(tmp_path / "hostile", "0.16.3", {"roll.py": BROKEN + "\n" + spite, "__init__.py": spite})
    names = ["sitecustomize", "usercustomize", "conftest", "setup", "yaml", "packaging/__init__", "packaging/version"]
    names += ["json", "ast", "shim/__init__", "noxfile", "megatron/__init__", "evil", "encodings/evil"]
    for name in names:
        write_file(root / f"{name}.py", spite)
    write_file(root / "megatron/core/transformer.py", "# coding: evil\n")
    write_file(root / "pyproject.toml", "[build-system]\nrequires = []\nbuild-backend = 'evil'\nbackend-path = ['.']\n")
    write_file(root / "evil.pth", f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
    command = write_file(
        tmp_path / "bin/command.py", "import sys; from shim._tools.cli import main; sys.exit(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MEGATRON_SHIM_MATRIX": str(world.matrix)}
    environ["PYTHONPATH"] += os.pathsep + str(world.own)
    for target in (".", str(root), "megatron/core"):
        done = subprocess.run(
            [sys.executable, str(command), "audit", "--json", target],
            cwd=root,
            env=environ,
            capture_output=True,
            text=True,
            timeout=patience(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert not marker.exists()
    assert not list(root.rglob("*.pyc"))
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    before = set(sys.modules)
    assert main(["audit", str(root)]) == 0
    assert not [name for name in set(sys.modules) - before if name.startswith("megatron")]
    assert not marker.exists()


def test_pip_runs_no_code_of_the_directory_it_is_called_in(world, tmp_path):
    """Who audits a checkout stands in it; pip, which fetches the release for a diff, must not find modules there."""
    marker = tmp_path / "ran"
    root = megatron(tmp_path / "hostile", "0.16.3", {"roll.py": BROKEN.replace("return helper(x)", "return 1")})
    for name in ("pip/__init__", "pip/__main__", "ssl", "json"):
        write_file(root / f"{name}.py", SPITE.format(marker=str(marker)))
    command = write_file(
        tmp_path / "bin/command.py", "import sys; from shim._tools.cli import main; sys.exit(main())\n"
    )
    environ = {**os.environ, "MEGATRON_SHIM_MATRIX": str(world.matrix), "PIP_NO_INDEX": "1"}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, world.own)))}
    environ |= {"MEGATRON_SHIM_CACHE": str(tmp_path / "cache")}
    arguments = {"cwd": root, "env": environ, "capture_output": True, "text": True, "timeout": patience()}
    done = subprocess.run([sys.executable, str(command), "audit", "."], **arguments)
    assert done.returncode == 1 and "could not be fetched" in done.stdout
    assert not marker.exists()


def test_nothing_is_written_into_the_tree(examine, tmp_path):
    """It may be a checkout that somebody works in."""
    root = megatron(tmp_path / "tree", "0.16.0", {"roll.py": BROKEN})
    before = files_of(root)
    examine(root)
    assert files_of(root) == before


# Sources

SOURCES = {
    "syntax error": b"def roll(:\n",
    "null bytes": b"def roll(x): pass\n\0\n",
    "not UTF-8": b"def roll(x): return '\xff'\n",
    "UTF-16": "def roll(x): pass\n".encode("utf-16"),
    "unknown cookie": b"# coding: no-such\n",
    "cookie that decompresses": b"# coding: zlib\n",
    "brackets": b"(" * 50_000,
    "attributes": b"x = a" + b".a" * 50_000,
    "sums": b"def roll(x):\n    return 1" + b"+1" * 20_000,
    "deep blocks": b"".join(b" " * i + b"if x:\n" for i in range(200)),
    "many lines": b"def roll(x):\n" + b"    x = x\n" * 20_000,
    "big number": b"def roll(x):\n    return " + b"9" * 100_000,
    "control characters": b"def roll(x):\n    return '\x1b[31m\x07\x08', f'\x1b{x}'\n",
    "too large": b"#" * (MAX_SOURCE_BYTES + 1),
    "empty": b"",
}


@pytest.mark.no_cover
@pytest.mark.parametrize("name", SOURCES)
def test_hostile_sources_are_drifted_or_gone(examine, tmp_path, wheel, name):
    """A verdict, with a reason, from a directory and from a wheel alike; never an exception."""
    root = megatron(tmp_path / "tree", "0.16.3")
    (root / "megatron/core/roll.py").write_bytes(SOURCES[name])
    found = examine(root)
    assert found["roll-fix"].verdict in ("drifted", "gone") and found["roll-fix"].reason
    assert all(len(difference.diff) <= 61 for difference in found["roll-fix"].differences)
    other = examine(wheel({"megatron/core/roll.py": SOURCES[name]}))
    assert other["roll-fix"].verdict == found["roll-fix"].verdict


@pytest.mark.parametrize("name", SOURCES)
def test_hostile_version_files_are_no_versions(examine, tmp_path, name):
    """They are read as text, and only their beginning."""
    root = megatron(tmp_path / "tree", None, {"roll.py": BROKEN})
    (root / "megatron/core/package_info.py").write_bytes(SOURCES[name])
    assert examine(root)["roll-fix"].verdict == "apply"


# Files that are none


@pytest.mark.parametrize("where", ["megatron/core/roll.py", "megatron/core/package_info.py", METADATA])
@pytest.mark.parametrize("what", ["pipe", "device", "loop", "dangling", "directory", "out", "chain"])
def test_links_pipes_and_devices(examine, tmp_path, where, what):
    """What is no file is not there, and is never opened; a link out of the tree is read, as an import would."""
    root = megatron(tmp_path / "tree", "0.16.3", {"roll.py": BROKEN})
    file = root / where
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    outside = write_file(tmp_path / "elsewhere.py", BROKEN)
    if what == "pipe":
        os.mkfifo(file)
    elif what == "directory":
        file.mkdir()
    elif what == "chain":
        for i in range(60):
            (root / f"link{i}").symlink_to(f"link{i + 1}")
        file.symlink_to(root / "link0")
    else:
        file.symlink_to({"device": "/dev/zero", "loop": file.name, "dangling": "gone", "out": outside}[what])
    verdict = examine(root)["roll-fix"].verdict
    assert verdict == ("gone" if where.endswith("roll.py") and what != "out" else "apply")


def test_a_directory_that_contains_itself(examine, tmp_path):
    """Nothing is walked through."""
    root = megatron(tmp_path / "tree", "0.16.3", {"roll.py": BROKEN})
    (root / "megatron" / "core" / "core").symlink_to(root / "megatron")
    (root / "megatron" / "core" / "megatron").symlink_to(root / "megatron")
    assert examine(root / "megatron/core/megatron/core")["roll-fix"].verdict == "apply"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("where", ["megatron/core/roll.py", "megatron/core", "megatron/core/package_info.py"])
def test_what_must_not_be_read_is_not_there_or_drifted(examine, tmp_path, where):
    """Permission denied, for a file or for a directory above it."""
    root = megatron(tmp_path / "tree", "0.16.3", {"roll.py": BROKEN})
    (root / where).chmod(0)
    try:
        found = examine(root)
        assert found["roll-fix"].verdict in ("apply", "drifted", "gone")
    except OptionError as error:
        assert "neither megatron/core" in str(error)
    finally:
        (root / where).chmod(0o700)


def test_names_with_line_ends_stay_in_their_line(examine, tmp_path):
    """In the target's name, in metadata, in a path that a reason quotes."""
    root = megatron(tmp_path / "a\n# heading\n| b |", "0.16.3", {"roll.py": "def roll(:\n"})
    write_file(root / "megatron_core-\n1.dist-info/METADATA", "Name: megatron-core\nVersion: 0.16.3\x1b[31m\n")
    known = lambda distribution, release: root  # noqa: E731
    found = audit(load_matrix(tmp_path / "matrix.yaml"), open_tree(str(root), known), known)
    for text in (as_text(found), as_markdown(found)):
        assert "\n# heading" not in text and "\x1b" not in text


# Metadata


@pytest.mark.parametrize(
    ("content", "version"),
    [
        (b"Version: " + b"1" * 90_000 + b"\n", "1" * 100 + "..."),
        (b"Version: 0.16.0\xff\n", "0.16.0\ufffd"),
        (b"Version:\n", "0.16.3"),
        (b"Name: x\n\nVersion: 0.16.0\n", "0.16.3"),
        (b"", "0.16.3"),
        (b"\0\n", "0.16.3"),
    ],
)
def test_metadata_is_read_from_its_beginning(world, tmp_path, wheel, content, version):
    """Some kB of headers are all there is to it; in a directory and in a wheel."""
    root = megatron(tmp_path / "tree", "0.16.3", {"roll.py": BROKEN})
    (root / METADATA).parent.mkdir()
    (root / METADATA).write_bytes(content)
    files = {METADATA: content, "megatron/core/package_info.py": (root / "megatron/core/package_info.py").read_bytes()}
    for place in (root, wheel(files)):
        assert open_tree(str(place), None).environment.installed["megatron-core"].raw == version


# Wheels


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../../evil.py",
        "..\\evil.py",
        "C:/evil.py",
        "megatron/core/../core/roll.py",
        "a\nb.py",
        "x" * 9000,
    ],
)
def test_no_member_of_a_wheel_is_unpacked(examine, wheel, tmp_path, name):
    """Whatever it is called."""
    path = wheel({name: b"def roll(x): pass\n"})
    before = sorted(tmp_path.rglob("*"))
    assert examine(path)["roll-fix"].verdict == "apply"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_members_with_one_name_the_last_counts(examine, wheel):
    """As for pip, which writes one over the other."""
    path = wheel({"megatron/core/roll.py": b"def roll(:\n"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("megatron/core/roll.py", BROKEN.replace("\n    ", "\n").lstrip())
    assert examine(path)["roll-fix"].verdict == "apply"


def test_a_truncated_wheel_is_no_wheel(world, wheel):
    """Wrong usage, with a reason; at whatever byte it ends."""
    whole = wheel().read_bytes()
    for size in (0, 1, 4, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        with pytest.raises(OptionError, match="is no archive that can be read"):
            open_tree(str(wheel(change=lambda data: data[:size])), None)


# Names of Transformer Engine


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Names that a hostile Transformer Engine lacks."""
    names = ["transformer_engine.pytorch:Linear", "transformer_engine.pytorch:Linear.forward"]
    monkeypatch.setattr(_wanted, "wanted_names", lambda: {name: {"wanted_by": ["0.16.0"], "in": []} for name in names})
    root = tmp_path / "te"
    write_file(root / "transformer_engine/__init__.py", "")

    def run(files):
        from shim._releases.sources import Sources

        for name, text in files.items():
            write_file(root / "transformer_engine" / name, text)
        return [name.name.partition(":")[2] for name in _wanted.lost_names(Sources([root]), None, ["2.1.0"])]

    return run


@pytest.mark.parametrize(
    ("files", "lost"),
    [
        ({"pytorch.py": "from .pytorch import *\n" * 50}, 1),
        ({"pytorch.py": "".join(f"from .m{i} import *\n" for i in range(30))}
         | {f"m{i}.py": "".join(f"from .m{j} import *\n" for j in range(30)) for i in range(30)}, 1),
        ({"pytorch.py": "from .a import Linear\n", "a.py": "from .pytorch import Linear\n"}, 1),
        ({"pytorch.py": "from .m0 import *\n"} | {f"m{i}.py": f"from .m{i + 1} import *\n" for i in range(400)}, 0),
        ({"pytorch.py": "from " + "." * 500 + "x import *\n"}, 0),
        ({"pytorch.py": "import transformer_engine.pytorch as Linear\n"}, 0),
        ({"pytorch.py": "def " + "f" * 100_000 + "(): pass\n" + "x = 1\n" * 50_000}, 1),
        ({"pytorch.py": "(" * 10_000}, 1),
    ],
    ids=["itself", "all of all", "circle", "chain", "dots", "alias", "many", "nested"],
)  # fmt: skip
def test_imports_in_circles_and_chains_end(engine, files, lost):
    """Each name is looked for once; a chain that is too long to follow counts as there."""
    assert len(engine(files)) == lost
