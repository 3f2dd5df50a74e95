"""What the shipped matrix says of real releases with bodies that nobody has seen: never "right" without evidence."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest
from recording import NO_SOURCES
from thorough import times

from shim._archives.trees import open_tree
from shim._errors import NotMetError
from shim._matrix.load import load_matrix
from shim._planning.match import match
from shim._planning.options import resolve
from shim._planning.plan import make_plan
from shim._planning.requirements import enforce
from shim._releases.fingerprint import FunctionNode, definitions, split_target
from shim._releases.sources import Sources
from shim.testing.releases import at_hand, fetch

MATRIX = load_matrix()
CORE = "megatron-core"
NEWEST = MATRIX.supported[CORE][-1]
SEEN = "its bodies are those of"  # how the reason says that all bodies are known to be right
HARMLESS = "_seen = None"
RELEASES = MATRIX.supported[CORE] if os.environ.get("SHIM_TEST_EVERY_RELEASE") == "1" else ("0.15.3", NEWEST)


def tree_with(tmp_path, release, files, version=None):
    """A source tree of a release with other text in some modules, given by name, and with another version if given.

    All else is linked, so that a tree costs some milliseconds.
    """
    home = fetch(release)
    root = tmp_path / "tree"
    changed = {Path(Sources([home]).path(module)): text for module, text in files.items()}
    if version is not None:
        changed[home / "megatron/core/package_info.py"] = version_text(version)
    for file in (home / "megatron").rglob("*.py"):
        place = root / file.relative_to(home)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file in changed:
            place.write_text(changed[file], "utf-8")
        else:
            place.symlink_to(file)
    return root


def version_text(version):
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    lines = [f"{name} = {number}" for name, number in numbers]
    return "\n".join([*lines, "PRE_RELEASE = ''", "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)", ""])


@cache
def text_of(release, module):
    return Path(Sources([fetch(release)]).path(module)).read_text("utf-8")


def with_a_line(text, qualnames):
    """`text` with one harmless statement more at the beginning of each of these functions."""
    tree, lines = ast.parse(text), text.split("\n")
    firsts = {
        d.node.body[0] if len(d.node.body) == 1 or not _is_docstring(d.node.body[0]) else d.node.body[1]
        for qualname in qualnames
        for d in definitions(tree, qualname)
        if isinstance(d.node, FunctionNode)
    }
    for first in sorted(firsts, key=lambda node: -node.lineno):
        if first.col_offset == len(lines[first.lineno - 1]) - len(lines[first.lineno - 1].lstrip()):
            lines.insert(first.lineno - 1, " " * first.col_offset + HARMLESS)
    return "\n".join(lines)


def _is_docstring(node):
    return isinstance(getattr(getattr(node, "value", None), "value", None), str)


def environment_of(root):
    return open_tree(str(root), None).environment


def decided(root, id):
    return match(MATRIX.patches[id], environment_of(root), MATRIX)


def test_one_harmless_line_in_a_function_that_a_patch_reads_is_no_evidence(tmp_path):
    """0.19.2's `_apply_gated_norm`: nothing else of the gated delta net stands in a release that was right."""
    module, qualname = "megatron.core.ssm.gated_delta_net.common", "_GDNBase._apply_gated_norm"
    text = with_a_line(text_of(NEWEST, module), [qualname])
    assert text != text_of(NEWEST, module)
    root = tree_with(tmp_path, NEWEST, {module: text})
    found = decided(root, "gated-delta-net-norm")
    assert found.state in ("apply", "drifted"), found.reason


OF_CORE = [id for id, entry in MATRIX.patches.items() if entry.distribution == CORE]


@pytest.mark.parametrize("id", OF_CORE[:: times(16, 1)])
def test_a_release_with_one_unknown_body_is_not_right(tmp_path, id):
    """Each body that the newest release has, one after the other; and all together, in the next release."""
    entry = MATRIX.patches[id]
    sources = Sources([fetch(NEWEST)])
    present = {}
    for target in entry.bodies:
        module, qualname = split_target(target)
        if sources.path(module) is not None:
            text = with_a_line(text_of(NEWEST, module), [qualname])
            if text != text_of(NEWEST, module):
                present[target] = text
    if not present:
        pytest.skip(f"{NEWEST} has no function of {id}")
    cases = [({split_target(target)[0]: text}, None) for target, text in present.items()]
    whole = {}
    for target in present:
        whole.setdefault(split_target(target)[0], []).append(split_target(target)[1])
    cases.append(({m: with_a_line(text_of(NEWEST, m), names) for m, names in whole.items()}, "0.20.0"))
    for number, (files, version) in enumerate(cases):
        found = decided(tree_with(tmp_path / str(number), NEWEST, files, version), id)
        if found.state in ("upstream", "not-needed"):
            assert "it has none of the patch's targets" in found.reason, found.reason


@pytest.mark.parametrize("id", ["lr-param-groups", "seq-aux-loss-scale"])
def test_a_fork_that_is_older_than_its_version_is_not_right_by_its_version(tmp_path, id):
    """The branch dev as 0.19.0: both are wrong there (one group of three; a loss scaled by half)."""
    dev = "d48bd6be0a"
    if not at_hand(dev):
        pytest.skip(f"{NO_SOURCES}{CORE} at commit {dev}")
    root = tree_with(tmp_path, dev, {}, version="0.19.0")
    found = decided(root, id)
    assert found.state in ("apply", "drifted"), found.reason
    if found.state == "drifted":
        words = r"it is not known whether megatron-core 0\.19\.0 needs this patch|its proofs fail on the same bodies"
        assert re.search(words, found.reason)
    plan = make_plan(environment_of(root), MATRIX, resolve(MATRIX, require=[id]))
    if found.state == "drifted":
        with pytest.raises(NotMetError, match=f"required, but {id} is drifted"):
            enforce(plan)


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_right_on_a_known_release_says_why(release):
    """By all bodies of a release that is, or because nothing is there that could be wrong."""
    environment = environment_of(fetch(release))
    for id, entry in MATRIX.patches.items():
        found = match(entry, environment, MATRIX)
        if found.state in ("upstream", "not-needed"):
            seen = (SEEN, "it has none of the patch's targets")
            assert any(words in found.reason for words in seen), (id, found.reason)
            assert found.state == MATRIX.wanted(id, release), id
