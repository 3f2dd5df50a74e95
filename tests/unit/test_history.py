"""Upstream's history: which bodies its commits have, which commits are proved, and what is kept of it."""

import json
import shutil

import pytest
from audit_cases import commit, git
from unit_helpers import BROKEN, FIXED, REWORKED, megatron, write_file

from shim._archives.git_commits import Git
from shim._archives.trees import open_tree
from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._planning.bodies import Bodies
from shim._planning.evidence import CANNOT_RUN, NOT_FIXED
from shim._planning.evidence import FIXED as IS_FIXED
from shim._releases.known_files import known_trees
from shim.maintenance.history import __main__ as history
from shim.maintenance.history.cover import chosen
from shim.maintenance.history.state import State
from shim.maintenance.history.walk import Commit, Walk, commits_of, heads_of
from shim.maintenance.known_trees import render_trees

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")

CORE = "megatron-core"
ONE = BROKEN.replace("return helper(x)", "return helper(x) + 1")
TWO = BROKEN.replace("return helper(x)", "return helper(x) + 2")
WITHOUT = "def other():\n    pass\n"


@pytest.fixture
def clone(tmp_path):
    """Commits on main with the bodies of releases, with others, with none; and on other branches."""
    root = megatron(tmp_path / "clone", "0.16.0", {"roll.py": BROKEN})
    git(root, "init", "-q", "-b", "main")
    commit(root)
    for text in (ONE, REWORKED, FIXED, WITHOUT, ONE + "\n    # again\n"):
        write_file(root / "megatron/core/roll.py", text)
        commit(root)
    for branch in ("core_r0.19.0", "a-feature", "core_r0.11.0"):
        git(root, "checkout", "-q", "-b", branch, "main")
        write_file(root / "megatron/core/roll.py", f"{TWO}\n    # {branch}\n")
        commit(root)
    return root / ".git"


@pytest.fixture
def walked(world, clone, tmp_path):
    """The bodies of roll-fix on each commit, oldest first."""

    def walk():
        repository = Git(clone)
        commits = commits_of(repository, CORE, heads_of(repository, CORE).values())
        found = Walk(repository, CORE, load_matrix(world.matrix), tmp_path / "cache")
        blobs = {each: found.blobs(each.hash) for each in commits}
        found.measure((blob, module) for having in blobs.values() for module, blob in having.items())
        walk.files = found.files((blob, module) for having in blobs.values() for module, blob in having.items())
        return {each: next(f for f in found.on(having) if f.entry.id == "roll-fix") for each, having in blobs.items()}

    return walk


def test_only_branches_that_users_run_count(clone):
    assert set(heads_of(Git(clone), CORE)) == {"main", "core_r0.19.0"}
    git(clone.parent, "branch", "-q", "-m", "main", "another")
    git(clone.parent, "branch", "-q", "-D", "core_r0.19.0")
    with pytest.raises(OptionError, match=r"none of the branches .* Remedy: fetch them"):
        heads_of(Git(clone), CORE)


def test_each_commit_has_its_own_bodies(walked, clone):
    """As they are found in its files. A comment makes no other set. Those of a release that is right are known, too."""
    found = walked()
    assert [each.is_released for each in found.values()] == [True, False, True, True, False, False, False]
    assert [each.has_targets for each in found.values()] == [True, True, True, True, False, True, True]
    digests = [each.digest for each in found.values()]
    assert len(set(digests)) == 6 and digests[1] == digests[5]
    for where, each in found.items():
        environment = open_tree(str(clone), None, where.hash).environment
        bodies = Bodies(each.entry, environment, each.bodies.matrix)
        for variant in (None, *each.entry.variants.values()):
            assert each.digest_of(variant) == bodies.digest(variant)


def test_a_blob_is_read_once(walked, monkeypatch):
    first = {where.hash: each.digest for where, each in walked().items()}
    monkeypatch.setattr(Git, "blobs", lambda *_: pytest.fail("a blob was read again"))
    assert {where.hash: each.digest for where, each in walked().items()} == first
    assert set(walked.files) == {"megatron.core.roll"} and len(walked.files["megatron.core.roll"]) == 7


def test_what_is_known_of_commits_before_is_left_out(clone):
    repository = Git(clone)
    head = heads_of(repository, CORE)["main"]
    assert [c.hash for c in commits_of(repository, CORE, [head], [f"{head}~1"])] == [head]
    assert len(commits_of(repository, CORE, [head])) == 6
    with pytest.raises(OptionError, match=r"cannot list the commits: .* Remedy: fetch the whole history"):
        commits_of(repository, CORE, ["gone"])


class Set:
    """Stands in for a Found: a set of bodies of one patch."""

    def __init__(self, name):
        self.digest = name
        self.entry = self
        self.id = "patch"


def order(having, done=(), preferred=lambda commit: False):
    """The commits in the order in which they are proved; each proves all of its sets."""
    judged = set(done)
    sets = {name: Set(name) for names in having.values() for name in names}
    unknown = {Commit(name, "2026"): [sets[each] for each in names] for name, names in having.items()}
    found = []
    for choice in chosen(unknown, lambda each: each.digest in judged, preferred):
        found.append((choice.commit.hash, "".join(each.digest for each in choice.new)))
        judged |= {each.digest for each in choice.new}
    return found


def test_the_commit_comes_first_whose_sets_most_commits_have():
    having = {"1": "abc", "2": "xy", "3": "x", "4": "x", "5": "x"}
    assert order(having) == [("2", "xy"), ("1", "abc")]
    assert order(having, done="x") == [("1", "abc"), ("2", "y")]
    assert order(having, preferred=lambda commit: commit.hash == "1") == [("1", "abc"), ("2", "xy")]
    assert order(having, done="abcxy") == []


def test_a_commit_on_which_nothing_can_run_is_tried_once():
    sets = [Set("a"), Set("b")]
    unknown = {Commit("1", "2026"): sets, Commit("2", "2026"): sets[:1]}
    assert [choice.commit.hash for choice in chosen(unknown, lambda each: False, lambda each: True)] == ["1", "2"] * 2


@pytest.fixture
def make_history(world, clone, tmp_path, monkeypatch, capsys):
    """`make history` with proofs that say `make_history.verdict`; what it printed."""
    trees = tmp_path / "known_trees.json"
    trees.write_text(render_trees({"trees": {}, "patches": {}, "files": {}}))
    for module in ("shim._releases.known_files", "shim.maintenance.history.__main__"):
        monkeypatch.setattr(f"{module}.TREES", trees)
    monkeypatch.setattr(history, "load_matrix", lambda: load_matrix(world.matrix))
    monkeypatch.setattr(history, "State", lambda name: State(name, tmp_path / "state.json"))
    monkeypatch.setattr(history, "prove", lambda *arguments: proved(*arguments))
    monkeypatch.setenv("MEGATRON_SHIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHIM_MEGATRON_GIT", str(clone.parent))
    known_trees.cache_clear()

    def proved(repository, distribution, where, ids, scratch):
        if make.verdict is None:
            return {"releases": {}, "error": "ImportError: no megatron", "seconds": 1}
        matrix, environment = load_matrix(world.matrix), open_tree(str(repository), None, where.hash).environment
        said = {}
        for id in ids:
            variant = next(iter(matrix.patches[id].variants.values()))
            bodies = Bodies(matrix.patches[id], environment, matrix).of(variant)
            said[id] = {"verdict": make.verdict, "variant": variant.name, "fingerprints": bodies, "shown": "1 -> 0"}
        about = {"date": "2026-01-02", "torch": "2.13.0", "python": "3.11", "where": "CPU"}
        return {"releases": {CORE: "0.16.0"}, "proved": {**about, "files": {}, "patches": said}, "seconds": 7}

    def make(*arguments):
        assert history.main(arguments) == 0
        return capsys.readouterr().out

    make.verdict, make.trees, make.state = IS_FIXED, trees, tmp_path / "state.json"
    yield make
    known_trees.cache_clear()


def test_it_goes_on_from_where_it_stopped(make_history):
    said = make_history("--commits", "1")
    assert "7 commits, 9 sets of bodies, 2 of them of no release; 2 are new" in said and "roll-fix: " in said
    assert "2 to prove" in said and "7 CPU seconds" in said
    [first] = json.loads(make_history.trees.read_text())["trees"].values()
    assert first["day"] and "releases" in first
    said = make_history("--commits", "5")
    assert "0 are new" in said and "1 to prove" in said and "roll-fix: fixed old" in said
    table = json.loads(make_history.trees.read_text())
    assert sum(len(each["bodies"]) for each in table["patches"]["roll-fix"]) == 2 == len(table["trees"])
    before = make_history.trees.read_text(), make_history.state.read_text()
    assert "0 to prove" in make_history("--commits", "5")
    assert (make_history.trees.read_text(), make_history.state.read_text()) == before


def test_a_set_that_no_proof_can_judge_is_not_tried_again(make_history):
    make_history.verdict = CANNOT_RUN
    assert "roll-fix: cannot run" in make_history("--commits", "5")
    assert json.loads(make_history.trees.read_text())["patches"] == {}
    make_history.verdict = IS_FIXED
    assert "0 to prove; no proof can judge 2" in make_history("--commits", "5")
    assert "2 to prove" in make_history("--commits", "5", "--again")


def test_a_commit_that_cannot_be_imported_is_not_tried_again(make_history):
    make_history.verdict = None
    assert "ImportError: no megatron" in make_history("--commits", "5")
    make_history.verdict = NOT_FIXED
    assert "CPU seconds" not in make_history("--commits", "5")
    assert "1 to prove" not in make_history("--commits", "5", "--again")


def test_a_set_is_forgotten_with_the_names_that_made_it(make_history, world):
    make_history("--commits", "5")
    world.pin(world.matrix.read_text().replace('        reads: ["megatron.core.roll:helper"]\n', ""))
    assert "2 are new" in make_history()
    assert len(json.loads(make_history.state.read_text())[CORE]["sets"]["roll-fix"]) == 2
    assert json.loads(make_history.trees.read_text())["patches"] == {}


def test_without_a_clone_it_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("SHIM_MEGATRON_GIT", raising=False)
    with pytest.raises(OptionError, match=r"SHIM_MEGATRON_GIT names no clone\. Remedy: git clone"):
        history.main([])
