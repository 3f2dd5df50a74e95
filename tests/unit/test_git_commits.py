"""A commit of a git directory is audited without checking it out, and nothing that the repository holds is run."""

import shutil

import pytest
from audit_cases import EDITED, commit, examiner, git
from unit_helpers import BROKEN, megatron, write_file

from shim._archives import git_commits as _git_commits
from shim._archives.trees import open_tree
from shim._errors import OptionError
from shim._releases.sources import MAX_SOURCE_BYTES
from shim._tools.audit import audit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")


@pytest.fixture
def checkout(tmp_path):
    """A repository whose tag `first` is as it should be, whose main has drifted, and whose files were edited since."""
    root = megatron(tmp_path / "checkout", "0.16.3", {"roll.py": BROKEN})
    git(root, "init", "-q", "-b", "main")
    commit(root)
    git(root, "tag", "-a", "-m", "a tag", "first")
    write_file(root / "megatron/core/roll.py", EDITED)
    commit(root)
    write_file(root / "megatron/core/roll.py", "def roll(:\n")
    return root


@pytest.fixture
def examine(world):
    """Audit a commit; known releases are the fake ones."""
    at_place = examiner(world)

    def run(directory, ref):
        def known(distribution, release):
            return world.root / "releases" / release

        from shim._matrix.load import load_matrix

        return audit(load_matrix(world.matrix), open_tree(str(directory), known, ref), known)

    run.at_place = at_place
    return run


def verdict(found):
    return next(finding for finding in found.findings if finding.id == "roll-fix").verdict


def test_each_commit_is_judged_by_its_own_files(examine, checkout):
    """And never by those that lie in the checkout."""
    commits = git(checkout, "rev-list", "main").split()
    for ref, expected in (("main", commits[0]), ("first", commits[1]), ("HEAD~1", commits[1]), (commits[1][:8],) * 2):
        found = examine(checkout, ref)
        assert found.tree.commit.startswith(expected)
        assert verdict(found) == ("drifted" if expected == commits[0] else "apply")
        assert found.tree.name == f"{checkout} at {ref}" and found.to_dict()["commit"] == found.tree.commit
        assert found.tree.environment.installed["megatron-core"].raw == "0.16.3"
    assert "cannot be parsed" in examine.at_place(checkout).findings[0].reason
    [difference] = examine(checkout, "main").findings[0].differences
    assert difference.diff[-1] == "+    return helper(x) + 1"


def test_every_form_of_a_git_directory(examine, checkout, tmp_path):
    """A checkout, a directory in it, its .git, a bare clone, another worktree; the checkout's files may be gone."""
    git(checkout, "clone", "-q", "--bare", ".", tmp_path / "bare.git")
    git(checkout, "worktree", "add", "-q", "--detach", tmp_path / "worktree", "first")
    (tmp_path / "link").symlink_to(checkout)
    places = [checkout, checkout / "megatron", checkout / "megatron/core", checkout / ".git", tmp_path / "link"]
    for place in (*places, tmp_path / "bare.git", tmp_path / "worktree"):
        assert verdict(examine(place, "main")) == "drifted", place
        assert verdict(examine(place, "first")) == "apply", place
    shutil.rmtree(checkout / "megatron")
    assert verdict(examine(checkout, "main")) == "drifted"


def test_packages_in_a_directory_of_a_larger_repository(examine, checkout, tmp_path):
    """As a trainer keeps a copy; the directory says which of two is meant."""
    for name, text in (("one", BROKEN), ("other", EDITED)):
        megatron(tmp_path / "trainer/third_party" / name, "0.16.3", {"roll.py": text})
    git(tmp_path / "trainer", "init", "-q")
    commit(tmp_path / "trainer")
    assert verdict(examine(tmp_path / "trainer/third_party/one", "HEAD")) == "apply"
    assert verdict(examine(tmp_path / "trainer/third_party/other/megatron/core", "HEAD")) == "drifted"
    with pytest.raises(OptionError, match="neither megatron/core nor transformer_engine"):
        examine(tmp_path / "trainer", "HEAD")


def test_links_and_large_files_of_a_commit_have_drifted(examine, checkout):
    """They are there, and are not read."""
    roll = checkout / "megatron/core/roll.py"
    roll.unlink()
    roll.symlink_to("../../../secret.py")
    commit(checkout)
    found = examine(checkout, "main").findings[0]
    assert found.verdict == "drifted" and "is a link, which is not followed" in found.reason
    roll.unlink()
    roll.write_bytes(b"#" * (MAX_SOURCE_BYTES + 1))
    commit(checkout)
    found = examine(checkout, "main").findings[0]
    assert found.verdict == "drifted" and "is larger than" in found.reason


def test_names_of_files_may_hold_anything(examine, checkout):
    """Line ends and quotes in a name, which git prints as they are."""
    write_file(checkout / 'megatron/core/a\n"b\t\\.py', "x = 1\n")
    write_file(checkout / "megatron/core/caf\udce9.py", "x = 1\n")
    write_file(checkout / "megatron/core/roll.py", EDITED)
    commit(checkout)
    assert verdict(examine(checkout, "main")) == "drifted"


# Nothing of the repository runs


@pytest.fixture
def spite(tmp_path):
    """A program that leaves a mark."""
    program = write_file(tmp_path / "spite", f"#!/bin/sh\ntouch {tmp_path}/ran\nexec false\n")
    program.chmod(0o755)
    return program


def test_hooks_filters_and_programs_of_the_configuration_are_not_run(examine, checkout, spite, tmp_path):
    """Though git runs some of them at once when somebody asks for the status."""
    for name in ("core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "diff.external", "core.gitProxy"):
        git(checkout, "config", name, spite)
    for name in ("filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.textconv"):
        git(checkout, "config", name, spite)
    for name in ("cat-file", "ls-tree", "rev-parse"):
        git(checkout, "config", f"alias.{name}", f"!{spite}")
        git(checkout, "config", f"pager.{name}", spite)
    git(checkout, "config", "core.hooksPath", checkout / "hooks")
    for name in ("post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc"):
        (checkout / "hooks").mkdir(exist_ok=True)
        shutil.copy(spite, checkout / "hooks" / name)
    for place in (checkout / ".gitattributes", checkout / ".git/info/attributes"):
        write_file(place, "* filter=evil diff=evil text eol=crlf export-subst\n")
    for ref, expected in (("main", "drifted"), ("first", "apply")):
        assert verdict(examine(checkout, ref)) == expected
    assert not (tmp_path / "ran").exists()
    git(checkout, "status", check=False)
    assert (tmp_path / "ran").exists(), "the trap would not have caught anything"


def test_a_partial_clone_fetches_nothing(examine, checkout, spite, tmp_path):
    """The transport that git would fetch missing objects by is a program that the configuration names."""
    clone = tmp_path / "clone"
    git(checkout, "config", "uploadpack.allowFilter", "true")
    git(checkout, "clone", "-q", "--bare", "--filter=blob:none", f"file://{checkout}", clone)
    git(clone, "config", "remote.origin.uploadpack", spite)
    git(clone, "config", "protocol.allow", "always")
    with pytest.raises(OptionError, match=r"Remedy: fetch"):
        examine(clone, "main")
    assert not (tmp_path / "ran").exists()
    git(clone, "cat-file", "blob", "main:megatron/core/roll.py", check=False)
    assert (tmp_path / "ran").exists(), "the trap would not have caught anything"


def test_variables_do_not_point_git_elsewhere(examine, checkout, tmp_path, monkeypatch):
    """A hook of git's, for instance, runs with some of them set."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "nowhere"))
    assert verdict(examine(checkout, "main")) == "drifted"


def test_a_commit_has_the_content_that_its_name_says(examine, checkout):
    """git can be told to show another in its place."""
    main, first = git(checkout, "rev-list", "main").split()
    git(checkout, "replace", main, first)
    assert verdict(examine(checkout, main)) == "drifted"


def test_nothing_is_written_into_the_repository(examine, checkout):
    """No index, no lock, no log."""

    def files():
        return {f: f.stat().st_mtime_ns for f in checkout.rglob("*") if f.is_file()}

    before = files()
    examine(checkout, "main")
    assert files() == before


# Refusals


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("gone", "has no commit 'gone'.*fetch it first"),
        ("0" * 40, "has no commit"),
        ("first^{tree}", "has no commit"),
        ("main:megatron", "has no commit"),
        ("", "no name of a commit"),
        ("--output=x", "no name of a commit"),
        ("-h", "no name of a commit"),
        ("a\nb", "no name of a commit"),
        ("a\0b", "no name of a commit"),
    ],
)
def test_what_is_no_commit_is_wrong_usage(examine, checkout, ref, message):
    """With what to give instead."""
    with pytest.raises(OptionError, match=message):
        examine(checkout, ref)


def test_where_there_is_no_repository(examine, checkout, tmp_path, monkeypatch):
    """A directory outside of one, something that is no directory, a bare one without --ref, no git at all."""
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(OptionError, match=r"git reads no repository.*leave out --ref"):
        examine(tmp_path / "plain", "main")
    for place in ("megatron-core==0.16.0", "==0.16.0", tmp_path / "gone", checkout / "megatron/core/roll.py"):
        with pytest.raises(OptionError, match="--ref belongs to a git directory"):
            examine(place, "main")
    for place in (checkout / ".git",):
        with pytest.raises(OptionError, match=r"a git directory without files; say which commit: --ref"):
            examine.at_place(place)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OptionError, match=r"--ref needs git, which cannot be run.*check the commit out"):
        examine(checkout, "main")


def test_limits_of_a_commit(examine, checkout, monkeypatch):
    """Bytes of sources, and seconds; both refusals name the way without git."""
    with monkeypatch.context() as lowered:
        lowered.setattr(_git_commits, "HELD_LIMIT", 100)
        with pytest.raises(OptionError, match=r"more than 100 bytes of sources.*name its directory"):
            examine(checkout, "main")
    with monkeypatch.context() as lowered:
        lowered.setattr(_git_commits, "PATIENCE", 1e-6)
        with pytest.raises(OptionError, match=r"git rev-parse in .* took more than.*name its directory"):
            examine(checkout, "main")
