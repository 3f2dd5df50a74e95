"""An audit survives whatever a tree or a wheel holds: none of its code runs, and time and memory stay bounded."""

import io
import os
import re
import struct
import subprocess
import sys
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit_helpers import BROKEN, REPOSITORY, megatron, write_file

from shim._archives.packed import WheelSources
from shim._archives.trees import open_tree
from shim._errors import OptionError, SourceError
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

NESTED = "".join(f"{' ' * i}if x:\n" for i in range(90)) + " " * 90 + "def roll(x): pass\n"
SOURCES = {
    "syntax error": b"def roll(:\n",
    "null bytes": b"def roll(x): pass\n\0\n",
    "not UTF-8": b"def roll(x): return '\xff'\n",
    "UTF-16": "def roll(x): pass\n".encode("utf-16"),
    "unknown cookie": b"# coding: no-such\n",
    "cookie of no text": b"# coding: rot13\n",
    "cookie that decompresses": b"# coding: zlib\n",
    "cookie that refuses": b"# coding: undefined\n",
    "cookie against a mark": b"\xef\xbb\xbf# coding: latin-1\n",
    "cookie with a path": b"# coding: ../../evil\n",
    "brackets": b"(" * 50_000,
    "brackets that close": b"x = " + b"(" * 5_000 + b")" * 5_000,
    "operators": b"x = " + b"-" * 100_000 + b"1",
    "attributes": b"x = a" + b".a" * 50_000,
    "sums": b"def roll(x):\n    return 1" + b"+1" * 20_000,
    "elif": b"def roll(x):\n    if x: pass\n" + b"    elif x: pass\n" * 5_000,
    "blocks": NESTED.encode(),
    "deep blocks": b"".join(b" " * i + b"if x:\n" for i in range(200)),
    "calls": b"def roll(x):\n    return " + b"f(" * 90 + b"x" + b")" * 90,
    "long line": b"def roll(x):\n    return " + b"'" + b"x" * 500_000 + b"'",
    "many lines": b"def roll(x):\n" + b"    x = x\n" * 20_000,
    "many definitions": b"def roll(x): pass\n" * 3_000,
    "big number": b"def roll(x):\n    return " + b"9" * 100_000,
    "names of every kind": "def roll(\uff58): return µ\nclass Läyer: pass\n".encode(),
    "control characters": b"def roll(x):\n    return '\x1b[31m\x07\x08', f'\x1b{x}'\n",
    "line ends": b"def roll(x):\r    return x\r\x0c\x0bx = 1\x1c\x1d\n",
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_sources_give_a_verdict(examine, tmp_path, data):
    """Fuzz: bytes put in and taken out at random places."""
    content = BROKEN.encode()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.sampled_from([0, 1, 5, 40])))
        pieces = st.sampled_from(
            [b"\0", b"\xff", b"# coding: utf-7\n", b"(", b"\\\n", b"\t", b"'''", b"\x0c", b"*", b"@x\n"]
        )
        content = content[:start] + data.draw(st.one_of(pieces, st.binary(max_size=4))) + content[end:]
    root = megatron(tmp_path / "tree", "0.16.3")
    (root / "megatron/core/roll.py").write_bytes(content)
    assert examine(root)["roll-fix"].verdict in ("apply", "upstream", "drifted", "gone")


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
        (b"Name: megatron-core\nVersion: 0.16.0\n" + b"x" * 50_000_000, "0.16.0"),
        (b"x" * 50_000_000, "0.16.3"),
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


def test_no_more_of_a_member_is_unpacked_than_asked_for(wheel):
    """The size that the archive states need not be true, so it is the reading that is bounded."""
    sources = WheelSources(wheel({"big": bytes(10_000_000)}))
    assert sources.beginning("big", 10) == bytes(10)
    with pytest.raises(SourceError, match="is larger than"):
        sources.member("big")


def marked_as_encrypted(data):
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = 0
        while (at := data.find(signature, at)) >= 0:
            (flags,) = struct.unpack_from("<H", data, at + offset)
            data = data[: at + offset] + struct.pack("<H", flags | 1) + data[at + offset + 2 :]
            at += 4
    return data


def test_an_encrypted_wheel_has_drifted(examine, wheel):
    """Its members are there, and cannot be read."""
    found = examine(wheel(change=marked_as_encrypted))["faster-forward"]
    assert found.verdict == "drifted" and "cannot be read" in found.reason


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_no_wheel_has_are_not_unpacked(examine, wheel, compression):
    """zipfile unpacks them in whole blocks, however few bytes are asked for."""
    found = examine(wheel(compression=compression))["faster-forward"]
    assert found.verdict == "drifted" and "a compression that wheels do not use" in found.reason


def test_a_truncated_wheel_is_no_wheel(world, wheel):
    """Wrong usage, with a reason; at whatever byte it ends."""
    whole = wheel().read_bytes()
    for size in (0, 1, 4, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        with pytest.raises(OptionError, match="is not a wheel"):
            open_tree(str(wheel(change=lambda data: data[:size])), None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_wheels_give_a_verdict_or_are_no_wheels(examine, wheel, data):
    """Fuzz: bytes changed at random places, of members and of the directory at the end alike."""
    path = wheel()
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.sampled_from([0, 1, 9, 12, 14, 99, 0x50, 0x7F, 0x80, 0xFF]))
    path.write_bytes(bytes(content))
    try:
        examine(path)
    except OptionError as error:
        assert str(path) in str(error)


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


# Memory and time, in a process of its own

MEASURE = """
    import resource, sys, time
    from pathlib import Path
    from shim._tools.cli import main
    codes = [main(["audit", target]) for target in sys.argv[1:]]
    print("codes", codes, "MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""


def test_bombs_and_giants_stay_within_bounds(world, wheel, tmp_path):
    """Members that unpack to far more than their limit, one that lies about its size, one that is a bomb itself, a
    file over the limit, a body of a hundred thousand lines, a hole of 20 GB."""

    def moved(path, name):
        return path.rename(tmp_path / name)

    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("zeros", "w") as member:
            for _ in range(300):
                member.write(bytes(1_000_000))
    inner = bomb.getvalue()
    targets = []
    for i, name in enumerate(("megatron/core/roll.py", METADATA, "megatron/core/package_info.py")):
        path = wheel({name: bytes(60_000_000)})
        if i == 0:  # and the size in the directory is a lie
            data = path.read_bytes().replace(struct.pack("<I", 60_000_000), struct.pack("<I", 1_000))
            path.write_bytes(data)
        targets.append(moved(path, f"bomb{i}.whl"))
    targets.append(moved(wheel({"megatron/core/roll.py": inner}), "nested.whl"))
    big = megatron(tmp_path / "big", "0.16.3")
    (big / "megatron/core/roll.py").write_bytes(b"x = 1\n" * (MAX_SOURCE_BYTES // 6 + 1))
    long = megatron(tmp_path / "long", "0.16.3", {"roll.py": "def roll(x):\n" + "    return helper(x)\n" * 100_000})
    with (tmp_path / "sparse.whl").open("wb") as file:
        file.truncate(20_000_000_000)
    targets += [big, long, tmp_path / "sparse.whl"]
    script = write_file(tmp_path / "measure.py", MEASURE)
    environ = {**os.environ, "MEGATRON_SHIM_MATRIX": str(world.matrix)}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, world.own))), "MEGATRON_SHIM_CACHE": str(tmp_path)}
    for release in ("0.16.0", "0.17.0"):
        (tmp_path / "megatron-core").mkdir(exist_ok=True)
        (world.root / "releases" / release / ".complete").touch()
        (tmp_path / "megatron-core" / release).symlink_to(world.root / "releases" / release)
    command = [sys.executable, str(script), *map(str, targets)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience())
    found = re.search(r"codes \[(.*)\] MB (\d+)", done.stderr)
    assert found, done.stderr
    assert found[1] == "1, 0, 0, 1, 1, 1, 2"
    assert int(found[2]) < MEMORY
