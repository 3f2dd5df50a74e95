"""Sources are located and read without importing anything, and whatever cannot be read is a SourceError."""

import ast
import sys
import types
import warnings
import zipfile

import pytest
from unit_helpers import write_file

from shim._errors import SourceError
from shim._releases.sources import MAX_SOURCE_BYTES, Sources, find_spec, search_path


def test_a_module_is_located_without_importing_its_parents(on_path, tmp_path):
    """A parent's __init__ may cost seconds, or need a GPU."""
    write_file(tmp_path / "parent/__init__.py", "raise RuntimeError\n")
    file = write_file(tmp_path / "parent/child/leaf.py", "x = 1\n")
    write_file(tmp_path / "parent/child/__init__.py", "raise RuntimeError\n")
    on_path(tmp_path)
    assert Sources().path("parent.child.leaf") == str(file)
    assert not any(name.startswith("parent") for name in sys.modules)


def test_namespace_packages_inside_others_are_searched(on_path, tmp_path):
    """A directory without __init__.py counts at every depth, and over several entries of sys.path."""
    first = write_file(tmp_path / "a/space/inner/one.py", "x = 1\n")
    second = write_file(tmp_path / "b/space/inner/deep/two.py", "x = 2\n")
    on_path(tmp_path / "a", tmp_path / "b")
    sources = Sources()
    assert sources.path("space.inner.one") == str(first)
    assert sources.path("space.inner.deep.two") == str(second)
    assert sources.path("space.inner") is None
    assert sources.path("space.other.two") is None


def test_namespace_packages_inside_regular_ones_are_searched(on_path, tmp_path):
    """Upstream forgets an __init__.py now and then."""
    write_file(tmp_path / "regular/__init__.py", "")
    file = write_file(tmp_path / "regular/bare/module.py", "x = 1\n")
    on_path(tmp_path)
    assert Sources().path("regular.bare.module") == str(file)


def test_a_loaded_module_is_where_it_was_loaded_from(on_path, tmp_path, monkeypatch):
    """sys.path may have changed since; what runs is what counts."""
    file = write_file(tmp_path / "elsewhere.py", "x = 1\n")
    module = types.ModuleType("loaded_one")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "loaded_one", module)
    on_path()
    assert Sources().path("loaded_one") == str(file)


def test_odd_objects_in_sys_modules_have_no_source(monkeypatch):
    """Stubs stand in sys.modules in many test suites; asking them must not run their code."""

    class Slots:
        __slots__ = ()

    class Trap(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("a lazy module was woken")

    monkeypatch.setitem(sys.modules, "stub_slots", Slots())
    monkeypatch.setitem(sys.modules, "stub_trap", Trap("stub_trap"))
    for name in ("stub_slots", "stub_trap"):
        assert Sources().path(name) is None
        assert search_path(name) == []
        with pytest.raises(SourceError, match="no module"):
            Sources().tree(name)


def test_our_own_finder_takes_no_part(monkeypatch):
    """Else the import hook would ask itself."""

    class Ours:
        is_shim_finder = True

        def find_spec(self, name, path=None, target=None):
            raise AssertionError("the search came to shim's own hook")

    monkeypatch.setattr(sys, "meta_path", [Ours(), *sys.meta_path])
    assert find_spec("json") is not None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def f(:\n", "cannot be parsed"),
        (b"x = '\xff'\n", "cannot be decoded"),
        (b"# -*- coding: no-such-codec -*-\n", "cannot be decoded"),
        (b"x = 1\0\n", "cannot be parsed"),
        (b"(" * 100_000, "cannot be parsed"),
        (b"-" * 200_000 + b"1", "cannot be parsed"),
        (b" " * (MAX_SOURCE_BYTES + 1), "larger than"),
    ],
)
def test_what_cannot_be_read_is_a_source_error(on_path, tmp_path, content, why):
    """A hostile or broken file gives a reason, never another exception."""
    (tmp_path / "broken.py").write_bytes(content)
    on_path(tmp_path)
    sources = Sources()
    for _ in range(2):  # the second time from memory
        with pytest.raises(SourceError, match=why):
            sources.tree("broken")


def test_a_file_that_is_gone_or_forbidden_is_a_source_error(on_path, tmp_path, monkeypatch):
    """A module can be loaded from a file that no longer exists."""
    module = types.ModuleType("gone_one")
    module.__file__ = str(tmp_path / "gone.py")
    monkeypatch.setitem(sys.modules, "gone_one", module)
    with pytest.raises(SourceError, match="cannot be read"):
        Sources().tree("gone_one")


def test_byte_code_has_no_readable_body_and_a_zip_has(on_path, tmp_path):
    """On disk and in a zip; beside its source, byte code in a zip is what an import takes, and the source is read."""
    (tmp_path / "compiled.pyc").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name in ("zipped.py", "both.py", "both.pyc", "alone.pyc"):
            archive.writestr(name, "x = 1\n" if name.endswith(".py") else "")
    on_path(tmp_path, tmp_path / "archive.zip")
    with pytest.raises(SourceError, match="not Python source"):
        Sources().tree("compiled")
    with pytest.raises(SourceError, match="not Python source"):
        Sources().tree("alone")
    for name in ("zipped", "both"):
        assert ast.unparse(Sources().tree(name)) == "x = 1"
    with pytest.raises(SourceError, match="no module"):
        Sources().tree("absent")


def test_folders_without_init_are_packages_in_a_zip_too(on_path, tmp_path):
    """As megatron-core has them, one in the other; for an import each needs an entry of its own in the zip."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for folder in ("outer/", "outer/inner/", "outer/inner/most/"):
            archive.writestr(folder, "")
        archive.writestr("outer/inner/most/module.py", "x = 1\n")
    on_path(tmp_path / "archive.zip")
    assert ast.unparse(Sources().tree("outer.inner.most.module")) == "x = 1"
    for absent in ("outer.inner.most.absent", "outer.inner.other.module"):
        with pytest.raises(SourceError, match="no module"):
            Sources().tree(absent)
    place = tmp_path / "archive.zip/outer/inner/most/module.py"
    assert Sources().path("outer.inner.most.module") == str(place)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfx = '\xc3\xa4'\r\n", b"# coding: latin-1\nx = '\xe4'\n"])
def test_encodings_are_read_as_python_reads_them(on_path, tmp_path, content):
    """Byte order marks, coding cookies and Windows line ends."""
    (tmp_path / "encoded.py").write_bytes(content)
    on_path(tmp_path)
    assert Sources().tree("encoded").body[0].value.value == "ä"


def test_warnings_about_upstream_code_are_not_ours(on_path, tmp_path):
    """An invalid escape in a release must neither print at plan time nor, under -W error, look like drift."""
    write_file(tmp_path / "warns.py", r'x = "\d"')
    on_path(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        Sources().tree("warns")
    assert said == []


def test_roots_replace_the_search(on_path, tmp_path):
    """Releases are pinned from unpacked wheels, without regard for what is installed."""
    write_file(tmp_path / "installed/package/module.py", "x = 'installed'\n")
    file = write_file(tmp_path / "root/package/module.py", "x = 'root'\n")
    package = write_file(tmp_path / "root/package/sub/__init__.py", "")
    on_path(tmp_path / "installed")
    sources = Sources([tmp_path / "nowhere", tmp_path / "root"])
    assert sources.path("package.module") == str(file)
    assert sources.path("package.sub") == str(package)
    assert sources.path("json") is None


def test_each_source_is_parsed_once(on_path, tmp_path):
    """Many patches share a file, and parsing is most of the cost of a plan."""
    file = write_file(tmp_path / "once.py", "x = 1\n")
    on_path(tmp_path)
    sources = Sources()
    tree = sources.tree("once")
    file.unlink()
    assert sources.tree("once") is tree
