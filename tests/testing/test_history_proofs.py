"""The proofs of the history on a commit of a real, edited release: only those that are asked for run."""

import fcntl
import shutil

import pytest
from audit_cases import commit, git
from recording import NO_SOURCES
from thorough import in_full

from shim._errors import OptionError
from shim._planning.evidence import FIXED
from shim.maintenance.history.proofs import prove
from shim.maintenance.history.walk import Commit
from shim.testing import fetch
from shim.testing.releases import FetchError

CORE, RELEASE = "megatron-core", "0.16.1"
EDITED = "megatron.core.transformer.transformer_layer:TransformerLayer.__init__"


@pytest.fixture
def repository(tmp_path):
    try:
        release = fetch(RELEASE)
    except FetchError as error:
        pytest.skip(f"{NO_SOURCES}megatron-core {RELEASE}: {error}")
    root = tmp_path / "clone"
    shutil.copytree(release / "megatron", root / "megatron")
    file = root / "megatron/core/transformer/transformer_layer.py"
    old = 'attention_optional_kwargs["cp_comm_type"] = config.cp_comm_type[self.layer_number]'
    new = f"kinds = config.cp_comm_type\n                {old.replace('config.cp_comm_type', 'kinds')}"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


@in_full
def test_a_commit_is_judged_as_a_tree_is(repository, tmp_path):
    """A commit without megatron-core says why nothing runs."""
    where = Commit(git(repository, "rev-parse", "HEAD").strip(), "2026-01-02")
    ids = ["cp-comm-type-list", "uniform-recompute-end"]
    told = prove(repository / ".git", CORE, where, ids, tmp_path / "scratch")
    assert told["releases"][CORE] == RELEASE and "transformer-engine" in told["releases"] and told["seconds"] > 0
    [(id, said)] = told["proved"]["patches"].items()  # no body of the other has changed
    assert (id, said["verdict"]) == ("cp-comm-type-list", FIXED) and EDITED in said["fingerprints"]
    assert not list((tmp_path / "scratch").glob("*.json"))
    (repository / "megatron/core/tensor_parallel/__init__.py").write_text("raise ImportError('not today')\n")
    commit(repository)
    where = Commit(git(repository, "rev-parse", "HEAD").strip(), "2026-01-02")
    assert "not today" in prove(repository / ".git", CORE, where, ids, tmp_path / "scratch")["error"]


def test_two_at_once_do_not_take_each_others_tree(tmp_path):
    """The second unpacked its commit over the first one's, whose proofs went on with it."""
    with open(tmp_path / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OptionError, match=r"another `make history` runs its proofs in .*Remedy: wait"):
            prove(tmp_path / "clone", CORE, Commit("0" * 40, "2026-01-02"), [], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
