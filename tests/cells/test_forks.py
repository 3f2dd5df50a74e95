"""Forks: a release with edits of somebody's own, or under a version of its own. What is applied, what is not, and why.

Edits of a process, as MindSpeed and Primus make them in memory, are in test_other_trainers.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from thorough import THOROUGH, in_full

import shim
from shim import testing
from shim.testing.patience import patience

CELLS = {"0.19.2": "all"}

ABOUT = []  # the patches, see chosen.py

CORE = Path(megatron.core.__file__).parent
BIAS, FROZEN = "expert-bias-padding", "frozen-recompute"
if shim.plan()[BIAS].action != "apply":
    pytest.skip("the edits are of a body that this release does not have or has fixed", allow_module_level=True)

ROUTER, BLOCK = "transformer/moe/router.py", "transformer/transformer_block.py"
COUNT = "self.local_tokens_per_expert += routing_map.sum(dim=0)"
MASK = "routing_map = routing_map & (~padding_mask)"
PARAMETER = "self, routing_map: torch.Tensor, padding_mask: Optional[torch.Tensor] = None"
VIEWLESS = "hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)"

# A fork: file -> what is edited, and the text instead.
LOGGED = {
    ROUTER: {COUNT: f"self.counts = getattr(self, 'counts', 0) + 1\n                {COUNT}"},
    BLOCK: {VIEWLESS: f"self.runs = getattr(self, 'runs', 0) + 1\n        {VIEWLESS}"},
}
COMMENTED = {ROUTER: {COUNT: f"# ours\n                {COUNT}"}}
FIXED = {ROUTER: {MASK: "routing_map = routing_map & (~padding_mask).unsqueeze(-1)"}}
FIXED_OTHERWISE = {ROUTER: {MASK: "routing_map = routing_map.masked_fill(padding_mask[:, None], False)"}}
RENAMED = {ROUTER: {PARAMETER: PARAMETER.replace("padding_mask", "mask")}}
MOVED = {ROUTER: {"def _apply_expert_bias(": "def _count_tokens(", "self._apply_expert_bias(": "self._count_tokens("}}


@pytest.fixture
def fork(tmp_path):
    """Makes a copy of the release with such edits, and with a version of its own if one is given."""

    def make(edits, version=None):
        core = tmp_path / "megatron" / "core"
        if not core.exists():
            shutil.copytree(CORE, core)
        for name, replaced in edits.items():
            text = (CORE / name).read_text()
            for old, new in replaced.items():
                assert old in text, f"{name} of this release has no {old!r}"
                text = text.replace(old, new)
            (core / name).write_text(text)
        if version is not None:
            info = (core / "package_info.py").read_text()
            (core / "package_info.py").write_text(re.sub(r"(?m)^__version__ = .*$", f"__version__ = {version!r}", info))
        return tmp_path

    return make


def run(tree, *arguments, **variables):
    """A process of Python that imports the fork in `tree`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SHIM_", "MEGATRON_SHIM_"))}
    env["TORCH_COMPILE_DISABLE"] = "1"  # to compile what counts tokens takes longer than the rest
    env["PYTHONPATH"] = os.pathsep.join([str(tree), str(Path(__file__).parents[1] / "support")])
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=patience())


def plan(tree):
    done = run(tree, "-m", "shim", "plan", "--json")
    return json.loads(done.stdout)["patches"]


# Of the release itself.
EXPECTED = {id: (shim.plan()[id].action, shim.plan()[id].variant) for id in shim.plan()}


def without(found, *ids):
    return {id: (entry["action"], entry["variant"]) for id, entry in found.items() if id not in ids}


def passes(tree, *tests):
    """Whether these tests of the release pass on the fork. A run without a test does not."""
    here = Path(__file__).parent
    root, names = here.parents[1], [str(here / name) for name in tests]
    done = run(
        tree,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "--rootdir",
        str(root),
        *names,
        "--tb=short",
    )
    return done.returncode == 0 or pytest.fail(done.stdout[-3000:] + done.stderr[-1000:])


def test_a_comment_changes_nothing(fork):
    found = plan(fork(COMMENTED))
    assert "its function matches a known release" in found[BIAS]["reason"] and without(found) == EXPECTED


def test_a_statement_more_leaves_the_tree_unknown_until_its_proofs_have_run(fork, tmp_path):
    """In a body that a patch wraps, and in one whose call it changes. Stock is as wrong there as in the release."""
    tree = fork(LOGGED)
    found = plan(tree)
    assert found[BIAS]["action"] == "drifted" and "pinned release" in found[BIAS]["reason"], found[BIAS]
    assert "shim pin --prove" in found[BIAS]["remedy"]
    assert list(found[FROZEN]["dropped"]) == ["megatron.core.transformer.transformer_block:TransformerBlock.forward"]
    changed = {id for id, entry in found.items() if (entry["action"], entry["variant"]) != EXPECTED[id]}
    assert all(found[id]["action"] == "drifted" for id in changed - {FROZEN}), changed
    if THOROUGH:
        lock = str(tmp_path / "shim.lock")
        done = run(tree, "-m", "shim", "pin", "--prove", "--only", f"{BIAS},{FROZEN}", "--lock", lock)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(run(tree, "-m", "shim", "plan", "--json", "--lock", lock).stdout)["patches"]
        assert {found[id]["action"] for id in (BIAS, FROZEN)} == {"apply"} and not found[FROZEN]["dropped"]


def test_a_fork_that_has_fixed_the_defect_as_upstream_did_is_left_alone(fork):
    """With the very bodies of a listed commit."""
    found = plan(fork(FIXED))
    assert found[BIAS]["action"] == "upstream"
    assert "its bodies are those of commit d98e8a64dd" in found[BIAS]["reason"]


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (RENAMED, "its body is not that of any pinned release"),
        (FIXED_OTHERWISE, "its body is not that of any pinned release"),
        (MOVED, "has no TopKRouter._apply_expert_bias"),
    ],
    ids=["renamed", "otherwise", "moved"],
)
def test_what_the_patch_needs_and_does_not_find_is_named(fork, edits, said):
    """Everything else is applied as on the release, but for patches that rely on the caller of what has moved."""
    tree = fork(edits)
    found = plan(tree)
    others = ("z-loss-padding", "packed-seq-aux-loss", "capacity-padding") if edits is MOVED else ()
    assert found[BIAS]["action"] == "drifted" and said in found[BIAS]["reason"], found[BIAS]
    assert "shim pin --prove" in found[BIAS]["remedy"]
    assert all(found[id]["action"] == "drifted" for id in others)
    same = without(found, BIAS, *others)
    assert same == {id: expected for id, expected in EXPECTED.items() if id not in (BIAS, *others)}


COUNTS = """
import shim
from shim import testing
from shim.patches.megatron_core.expert_bias_padding.proof import counted

with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
    shim.apply(only=["expert-bias-padding"])
    print(shim.status()["expert-bias-padding"].state)
    print(counted(tokens=4, padding=2).tolist() == counted(tokens=4).tolist())
"""


@in_full
def test_a_fix_that_nobody_knows_is_not_patched_over(fork):
    """It would be wrong afterwards. The warning says that it was left alone, and on_drift='apply' insists."""
    tree = fork(FIXED_OTHERWISE)
    done = run(tree, "-c", COUNTS)
    assert done.stdout.splitlines() == ["drifted", "True"], done.stdout + done.stderr
    assert BIAS in done.stderr and "shim pin --prove" in done.stderr
    forced = run(tree, "-c", COUNTS, MEGATRON_SHIM_ON_DRIFT="apply")
    assert forced.stdout.splitlines() == ["applied"] and "RuntimeError" in forced.stderr, forced.stdout


@pytest.mark.parametrize("version", [f"{testing.release()}+ours", "9.9.9", "not a version"])
def test_a_vendored_copy_is_known_by_its_bodies(fork, version):
    """Whatever version it says, and also where that is none."""
    found = without(plan(fork({}, version)))
    applied = {id: expected for id, expected in EXPECTED.items() if expected[0] == "apply"}
    assert applied and {id: found[id] for id in applied} == applied
