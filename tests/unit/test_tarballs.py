"""Sdists and archives of commits: found one directory down, and read without unpacking them."""

import io
import os
import random
import tarfile
import zipfile

import pytest
from audit_cases import EDITED
from unit_helpers import BROKEN, megatron, write_file

from shim._archives import packed as packed_sources
from shim._archives.trees import open_tree
from shim._errors import OptionError
from shim._releases.sources import MAX_SOURCE_BYTES

COMMIT = "0123456789" * 4
INFO = "Metadata-Version: 2.1\nName: megatron_core\nVersion: 0.16.7\n"


@pytest.fixture
def tree(tmp_path):
    return megatron(tmp_path / "tree", "0.16.3", {"roll.py": EDITED})


def packed(root, path, below="megatron_core-0.16.3/", mode="w:gz", **arguments):
    """A tar archive of `root`, all of it in the directory `below`."""
    with tarfile.open(path, mode, **arguments) as archive:
        archive.add(root, below.rstrip("/") or ".")
    return path


def zipped(root, path, below="Megatron-LM-main/", comment=b""):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, below + file.relative_to(root).as_posix())
        archive.comment = comment
    return path


def said(found):
    return [(f.id, f.verdict, f.reason, [d.diff for d in f.differences]) for f in found.findings]


FORMATS = {"old": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "POSIX": tarfile.PAX_FORMAT}


@pytest.mark.parametrize("below", ["", "./", "megatron_core-0.16.3/", "d" * 90 + "/"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_archive_gives_what_its_directory_gives(examine, tree, tmp_path, below, format_name):
    """In every format of tar, packed by gzip or not, at the top or one directory down; long names included."""
    deep = "megatron/core/" + "/".join("subdirectory" * 3 for _ in range(2)) + "/" + "m" * 60
    write_file(tree / f"{deep}.py", "x = 1\n")
    expected = said(examine(tree))
    for name, mode in (("a.tar.gz", "w:gz"), ("a.tar", "w")):
        path = packed(tree, tmp_path / name, below, mode, format=FORMATS[format_name])
        found = examine(path)
        assert said(found) == expected
        assert found.tree.environment.installed["megatron-core"].raw == "0.16.3"
        assert found.tree.environment.sources.path(deep.replace("/", ".")) is not None


def test_a_zip_with_its_root_one_directory_down(examine, tree, tmp_path):
    """As GitHub makes it; its comment names the commit."""
    found = examine(zipped(tree, tmp_path / "main.zip", comment=COMMIT.encode()))
    assert said(found) == said(examine(tree))
    assert found.tree.commit == COMMIT and found.to_dict()["commit"] == COMMIT
    assert examine(zipped(tree, tmp_path / "plain.zip", comment=b"no commit")).tree.commit == ""


def test_the_archive_of_a_commit_names_it(examine, tree, tmp_path):
    """git writes it into a global header."""
    path = tmp_path / "commit.tar.gz"
    packed(tree, path, format=tarfile.PAX_FORMAT, pax_headers={"comment": COMMIT})
    assert examine(path).tree.commit == COMMIT


@pytest.mark.parametrize("pack", [packed, zipped])
def test_the_metadata_of_an_sdist_says_its_version(examine, tree, tmp_path, pack):
    """PKG-INFO, at the root; that of another project does not count."""
    write_file(tree / "PKG-INFO", INFO)
    found = examine(pack(tree, tmp_path / "a")).tree.environment.installed["megatron-core"]
    assert (found.raw, found.origin) == ("0.16.7", "distribution metadata")
    assert examine(tree).tree.environment.installed["megatron-core"].raw == "0.16.7"
    write_file(tree / "PKG-INFO", INFO.replace("megatron_core", "megatron-core-of-ours"))
    assert examine(pack(tree, tmp_path / "a")).tree.environment.installed["megatron-core"].raw == "0.16.3"


@pytest.mark.parametrize("pack", [packed, zipped])
def test_the_version_of_transformer_engine_is_in_a_file(examine, tmp_path, pack):
    """build_tools/VERSION.txt of its repository, in an archive as in a directory."""
    write_file(tmp_path / "te/transformer_engine/__init__.py", "")
    write_file(tmp_path / "te/build_tools/VERSION.txt", "2.9.0.dev0\n")
    found = examine(pack(tmp_path / "te", tmp_path / "a"))
    assert found.tree.environment.installed["transformer-engine"].raw == "2.9.0.dev0"


@pytest.mark.parametrize("pack", [packed, zipped])
def test_what_holds_no_package_or_two_is_wrong_usage(examine, tree, tmp_path, pack):
    """Nobody guesses which of two directories is meant."""
    write_file(tmp_path / "other/numpy/__init__.py", "")
    with pytest.raises(OptionError, match="neither megatron/core nor transformer_engine is in there"):
        examine(pack(tmp_path / "other", tmp_path / "a"))
    megatron(tmp_path / "two/one", "0.16.0")
    megatron(tmp_path / "two/other", "0.17.0")
    with pytest.raises(OptionError, match=r"has the packages in one/ and in other/; unpack it and name one"):
        examine(pack(tmp_path / "two", tmp_path / "a", below=""))


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"x" * 2000])
def test_what_is_no_archive_is_wrong_usage(examine, tmp_path, content):
    """The message says what to give."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(OptionError, match=r"is no archive that can be read.*name a release .*an sdist"):
        examine(tmp_path / "a")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("damage", [lambda all: all[: len(all) // 2], lambda all: all[:-20_000] + b"x" * 20_000])
def test_a_damaged_archive_is_wrong_usage(examine, tree, tmp_path, mode, damage):
    """Also if the damage lies far behind what tells that it is an archive."""
    noise = random.Random(0).randbytes(200_000)
    write_file(tree / "megatron/core/noise.py", f"x = '{noise.hex()}'")
    path = packed(tree, tmp_path / "a", mode=mode)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(OptionError, match=r"is no archive that can be read"):
        examine(path)


# Odd archives


def archive_of(path, members, mode="w:gz", format=tarfile.PAX_FORMAT):
    """A tar archive with these members behind those of a megatron-core; `members` are TarInfo and content."""
    with tarfile.open(path, mode, format=format) as archive:
        for name, text in (("__init__.py", ""), ("roll.py", BROKEN)):
            member = tarfile.TarInfo(f"top/megatron/core/{name}")
            content = "\n".join(line[4:] for line in text.split("\n")).encode()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return path


def entry(name, content=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


@pytest.mark.parametrize("name", ["/top/megatron/core/roll.py", "../top/megatron/core/roll.py", "top/../../roll.py"])
def test_names_that_lead_out_of_the_archive_are_not_there(examine, tmp_path, name):
    """Nothing is written anywhere either."""
    path = archive_of(tmp_path / "a", [entry(name, b"def roll(:\n")])
    before = sorted(tmp_path.rglob("*"))
    assert [f.verdict for f in examine(path).findings] == ["apply", "apply"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("to", ["/etc/passwd", "../../../../etc/passwd", "roll.py", "helper.py"])
def test_links_are_not_followed(examine, tmp_path, kind, to):
    """The body counts as drifted, not as gone, and the reason says why."""
    link = entry("top/megatron/core/roll.py", type=kind, linkname=to)
    found = examine(archive_of(tmp_path / "a", [link])).findings[0]
    assert found.verdict == "drifted" and "is a link, which is not followed" in found.reason


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE])
def test_devices_and_pipes_are_no_files(examine, tmp_path, kind):
    """The file of that name, which stands before them, stays."""
    path = archive_of(tmp_path / "a", [entry("top/megatron/core/roll.py", type=kind)])
    assert examine(path).findings[0].verdict == "apply"


def test_of_members_with_one_name_the_last_counts(examine, tmp_path):
    """As for tar, which writes one over the other."""
    path = archive_of(tmp_path / "a", [entry("top/megatron/core/roll.py", b"def roll(:\n")])
    assert examine(path).findings[0].verdict == "drifted"


def test_a_file_larger_than_any_source_has_drifted(examine, tmp_path):
    """It is not held in memory."""
    path = archive_of(tmp_path / "a", [entry("top/megatron/core/roll.py", bytes(MAX_SOURCE_BYTES + 1))])
    found = examine(path).findings[0]
    assert found.verdict == "drifted" and "is larger than" in found.reason


@pytest.mark.parametrize("end", [1, 100, 25_000, 50_000])
@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_a_truncated_archive_is_wrong_usage(examine, tmp_path, end, mode):
    """Wherever it ends within a member."""
    path = archive_of(tmp_path / "a", [entry("top/megatron/core/x.py", os.urandom(50_000))], mode)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(OptionError, match="is no archive that can be read"):
        examine(path)


def test_an_archive_with_more_than_any_release_has_is_refused(tmp_path, monkeypatch):
    """The archive is past a limit that was lowered for this."""
    held = archive_of(tmp_path / "held", [entry("top/megatron/core/x.py", bytes(300_000))])
    open_tree(str(held), None)
    monkeypatch.setattr(packed_sources, "HELD_LIMIT", 200_000)
    with pytest.raises(OptionError, match="more than 200000 bytes of sources"):
        open_tree(str(held), None)
