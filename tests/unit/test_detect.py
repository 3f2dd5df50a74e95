"""Step 1: what is installed is found without running any of it, and what the sources disagree about is said."""

import sys
from importlib.metadata import DistributionFinder, MetadataPathFinder
from pathlib import Path

import pytest
from unit_helpers import megatron, metadata, output_of, write_file

from shim._releases.detect import VERSION_LIMIT, detect


@pytest.fixture
def found(on_path):
    """What detect() says of megatron-core with these directories on sys.path; None where it is not installed."""

    def look(*directories):
        on_path(*directories)
        return detect().installed.get("megatron-core")

    return look


def test_metadata_beside_the_package_gives_the_version(found, tmp_path):
    """An installed wheel is known by its distribution metadata."""
    metadata(megatron(tmp_path, "0.17.1"), "0.17.1")
    core = found(tmp_path)
    assert (core.raw, core.origin, core.problems) == ("0.17.1", "distribution metadata", ())
    assert Path(core.location) == tmp_path / "megatron" / "core"


def test_a_source_tree_without_metadata_has_the_version_of_its_version_file(found, tmp_path):
    """RL images put a checkout on PYTHONPATH; its version file is read as text and never run."""
    core = found(megatron(tmp_path, "0.17.0rc0"))
    assert (core.raw, core.origin, core.problems) == ("0.17.0rc0", "version file", ())


def test_a_regular_package_megatron_is_looked_into_as_well(found, tmp_path):
    """megatron is a namespace package in the wheel, and a regular one in some checkouts."""
    assert found(megatron(tmp_path, "0.16.1", namespace=False)).raw == "0.16.1"


def test_a_source_tree_before_an_installed_wheel_counts_and_the_wheel_is_reported(found, tmp_path):
    """The version is that of the copy an import would use; the other one is a problem."""
    wheel = megatron(tmp_path / "site", "0.18.0")
    metadata(wheel, "0.18.0")
    core = found(megatron(tmp_path / "tree", "0.16.0"), wheel)
    assert (core.raw, core.origin) == ("0.16.0", "version file")
    assert len(core.problems) == 1
    assert "another copy" in core.problems[0] and f"0.18.0 at {wheel}" in core.problems[0]


def test_a_source_tree_behind_an_installed_wheel_is_only_reported(found, tmp_path):
    """The order of sys.path decides, not whether there is metadata."""
    wheel, tree = megatron(tmp_path / "site", "0.18.0"), megatron(tmp_path / "tree", "0.16.0")
    metadata(wheel, "0.18.0")
    core = found(wheel, tree)
    assert core.raw == "0.18.0"
    assert [f"0.16.0 at {tree}" in problem for problem in core.problems] == [True]


def test_two_source_trees_are_a_problem_although_neither_has_metadata(found, tmp_path):
    """A second checkout on PYTHONPATH is silent in Python; not here."""
    first, second = megatron(tmp_path / "a", "0.17.0"), megatron(tmp_path / "b", "0.19.2")
    core = found(first, second)
    assert core.raw == "0.17.0"
    assert [f"0.19.2 at {second}" in problem for problem in core.problems] == [True]


def test_the_same_directory_twice_on_the_path_is_no_second_copy(found, tmp_path):
    """'' and the current directory, or a link to it, often name the same place."""
    metadata(megatron(tmp_path / "site", "0.17.0"), "0.17.0")
    (tmp_path / "link").symlink_to(tmp_path / "site")
    assert found(tmp_path / "site", tmp_path / "link", tmp_path / "site").problems == ()


def test_metadata_and_version_file_that_disagree_are_reported(found, tmp_path):
    """Sources copied over an installed wheel leave stale metadata."""
    metadata(megatron(tmp_path, "0.19.2"), "0.17.0")
    core = found(tmp_path)
    assert core.raw == "0.17.0"
    assert core.problems == ("metadata says 0.17.0, the package's version file says 0.19.2",)


def test_metadata_of_two_versions_in_one_place_is_reported(found, tmp_path):
    """An interrupted upgrade leaves two dist-info directories."""
    metadata(megatron(tmp_path, "0.17.0"), "0.17.0")
    metadata(tmp_path, "0.16.0")
    assert any("more than once" in problem for problem in found(tmp_path).problems)


@pytest.mark.parametrize(
    "written", ["0.17.0+abc123", "0.17.0rc0", "0.17.0rc0+abc", "0.17.0.dev0+gdeadbee", "0.17.0.post1"]
)
def test_suffixes_belong_to_their_release(found, tmp_path, written):
    """Local parts never disagree with the version file, and the raw string is kept."""
    public = written.partition("+")[0]
    root = megatron(tmp_path, "0.17.0" if "post" in public else public)
    metadata(root, written)
    core = found(root)
    assert core.raw == written
    assert core.to_dict()["public"] == public
    assert core.problems == () or "post" in public


def test_nothing_installed_is_nothing(found, tmp_path):
    """No package, no entry; metadata without a package is no installation either."""
    assert found(tmp_path) is None
    metadata(tmp_path, "0.17.0")
    assert found(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "MAJOR = (",
        "MAJOR = '0'\nMINOR = 1\nPATCH = 2\n",
        "MAJOR, MINOR = 0, 17\n",
        "MAJOR = MINOR = 1\n",
        "MAJOR = 0x" + "f" * 9000 + "\nMINOR = PATCH = 1\n",
        "",
        "\0",
        "#" * 200_000,
    ],
)
def test_a_broken_version_file_leaves_the_version_open(found, tmp_path, text):
    """The package is there, its version is unknown, which is a problem and not an exception."""
    root = megatron(tmp_path, None)
    write_file(root / "megatron/core/package_info.py", text)
    core = found(root)
    assert (core.raw, core.version, core.origin) == (None, None, "unknown")
    assert any("no readable version" in problem for problem in core.problems)


@pytest.mark.parametrize("raw", ["nvidia-24.05-custom", "1!" + "9" * 5000])
def test_a_vendor_string_is_kept_but_decides_nothing(found, tmp_path, raw):
    """What is not PEP 440 gives no version and a problem that says so."""
    home = megatron(tmp_path, "0.17.0") / "megatron_core-0.dist-info"
    write_file(home / "METADATA", f"Name: megatron-core\nVersion: {raw}\n")
    core = found(tmp_path)
    shown = raw if len(raw) <= VERSION_LIMIT else raw[:VERSION_LIMIT] + "..."
    assert (core.raw, core.version) == (shown, None)
    assert any("not a PEP 440 version" in problem for problem in core.problems)


def test_metadata_that_cannot_be_decoded_is_as_none(found, tmp_path):
    """A broken METADATA file leaves the version file."""
    home = metadata(megatron(tmp_path, "0.17.0"), "0.17.0")
    (home / "METADATA").write_bytes(b"Name: megatron-core\nVersion: \xff\xfe\n")
    assert found(tmp_path).raw == "0.17.0"


@pytest.mark.parametrize(
    "name", ["megatron_core.egg-info", "megatron_core-0.16.9-py3.11.egg-info", "Megatron.Core-1.dist-info"]
)
@pytest.mark.parametrize("as_file", [False, True])
def test_metadata_of_older_installers_gives_the_version(found, tmp_path, name, as_file):
    """An egg-info has PKG-INFO, may be a file itself, and stands beside the sources after `setup.py develop`."""
    text = "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.9+mine\n\nVersion: not this one\n"
    megatron(tmp_path, "0.16.9")
    write_file(tmp_path / name if as_file else tmp_path / name / "PKG-INFO", text)
    core = found(tmp_path)
    assert (core.raw, core.origin, core.problems) == ("0.16.9+mine", "distribution metadata", ())


def test_what_other_finders_know_counts_too(found, tmp_path, monkeypatch):
    """A tool may have a finder of its own for metadata; importlib asks it, and so does shim."""
    metadata(tmp_path / "elsewhere", "0.17.0+found")

    class Finder:
        def find_spec(self, *_):
            return None

        def find_distributions(self, context):
            return MetadataPathFinder.find_distributions(
                DistributionFinder.Context(path=[str(tmp_path)], name=context.name)
            )

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    megatron(tmp_path / "tree", "0.17.0")
    metadata(tmp_path, "0.17.0+found")
    core = found(tmp_path / "tree")
    assert any("0.17.0+found at" in problem for problem in core.problems)


def editable(tree, *, value=True):
    return {"url": f"file://{tree}", "dir_info": {"editable": value} if value else {}}


def test_an_editable_install_is_known_by_its_record(found, tmp_path):
    """Its metadata lies in site-packages and says where the sources are."""
    tree = megatron(tmp_path / "my tree", "0.17.0")
    metadata(tmp_path / "site", "0.17.0+local", direct_url=editable(str(tree).replace(" ", "%20")))
    core = found(tmp_path / "site", tree)
    assert (core.raw, core.origin, core.problems) == ("0.17.0+local", "distribution metadata", ())


def test_the_sources_of_an_editable_install_outrank_its_older_metadata(found, tmp_path):
    """After `git pull` the tree is newer than the metadata; what would be imported counts."""
    tree = megatron(tmp_path / "tree", "0.19.0")
    metadata(tmp_path / "site", "0.17.0", direct_url=editable(tree))
    core = found(tmp_path / "site", tree)
    assert (core.raw, core.origin) == ("0.19.0", "version file")
    assert core.problems == ("metadata says 0.17.0, the package's version file says 0.19.0",)


def test_an_install_from_a_directory_is_no_editable_one(found, tmp_path):
    """`pip install ./tree` records the directory too, but copies it: the metadata is that of the copy."""
    tree = megatron(tmp_path / "tree", "0.19.0")
    metadata(megatron(tmp_path / "site", "0.17.0"), "0.17.0", direct_url=editable(tree, value=False))
    core = found(tree, tmp_path / "site")
    assert core.raw == "0.19.0"
    assert [f"0.17.0 at {tmp_path / 'site'}" in problem for problem in core.problems] == [True]


@pytest.mark.parametrize("record", [[], {"url": None}, {"url": 3, "dir_info": {"editable": True}}, "text", {}])
def test_an_odd_record_of_origin_is_ignored(found, tmp_path, record):
    """direct_url.json is written by many tools."""
    tree = megatron(tmp_path / "tree", "0.17.0")
    metadata(tmp_path / "site", "0.18.0", direct_url=record)
    assert found(tmp_path / "site", tree).raw == "0.17.0"


def test_torch_and_transformer_engine_are_found_by_their_own_version_files(on_path, tmp_path):
    """Each distribution has its own place for the version."""
    write_file(tmp_path / "torch/__init__.py", "raise RuntimeError\n")
    write_file(tmp_path / "torch/version.py", "from typing import Optional\n__version__: str = '2.9.0+cu130'\n")
    write_file(tmp_path / "transformer_engine/__init__.py", "raise RuntimeError\n")
    write_file(tmp_path / "build_tools/VERSION.txt", "2.8.0\n")
    on_path(tmp_path)
    installed = detect().installed
    assert {name: found.raw for name, found in installed.items()} == {
        "torch": "2.9.0+cu130",
        "transformer-engine": "2.8.0",
    }


def test_what_the_finder_of_somebody_else_forbids_counts_as_installed(found, tmp_path, monkeypatch):
    """It is not asked, because it may import. An import fails then, and patches stay pending."""

    class Forbid:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "megatron":
                raise ImportError("not here")

    monkeypatch.setattr(sys, "meta_path", [Forbid, *sys.meta_path])
    assert found(megatron(tmp_path)) is not None


@pytest.mark.parametrize("call", ["detect", "plan", "doctor"])
def test_no_process_is_started_and_nothing_imported(tmp_path, call):
    """Neither git nor anything else runs, and neither torch nor megatron is imported."""
    metadata(megatron(tmp_path, "0.16.0"), "0.16.0")
    write_file(tmp_path / "torch/__init__.py", "raise RuntimeError('torch was imported')\n")
    calls = {
        "detect": "from shim._releases.detect import detect; found = detect().installed",
        "plan": "import shim; found = shim.plan().environment.installed",
        "doctor": "from shim._tools.doctor import examine; found = examine()['installed']",
    }
    code = f"""
        import sys
        started = []
        watched = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec")
        sys.addaudithook(lambda event, arguments: started.append((event, arguments)) if event in watched else None)
        {calls[call]}
        assert "megatron-core" in found and "torch" in found
        assert not started, started
        assert not {{"torch", "megatron", "megatron.core"}} & set(sys.modules)
    """
    output_of(code, tmp_path)
