"""An audit of one distribution beside a release of the other: a patch whose rules name both always has a verdict."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from audit_cases import EDITED, wheel_of
from unit_helpers import BROKEN, FIXED, MATRIX, REPOSITORY, megatron, metadata, write_file

from shim._archives.trees import open_tree
from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._matrix.model import RIGHT
from shim._planning import match as _match
from shim._te import names as _wanted
from shim._tools.audit import FINE, VERDICTS, Finding, audit
from shim._tools.audit_report import as_markdown, as_text

# roll-fix is needed beside Transformer Engine 2.2 and later; a patch of Transformer Engine comes with it.
BOTH = (
    MATRIX.replace('<0.17.0.dev0", variant', '<0.17.0.dev0", transformer-engine: ">=2.2.dev0", variant')
    .replace('<0.18.0.dev0", variant', '<0.18.0.dev0", transformer-engine: ">=2.2.dev0", variant')
    .replace('<0.19.0.dev0", note: fixed', '<0.19.0.dev0", transformer-engine: ">=2.1.dev0", note: fixed')
    .replace(
        "    upstream:\n",
        "    upstream:\n"
        '      - {megatron-core: ">=0.16.0.dev0,<0.18.0.dev0", '
        'transformer-engine: ">=2.1.dev0,<2.2.dev0", note: as it was}\n',
        1,
    )
    .replace('"0.18.0"]', '"0.18.0"]\n  transformer-engine: ["2.1.0", "2.3.0"]')
)


def engine(root, version):
    moved = "" if (version or "2.2") < "2.2" else "moved = 1\n"
    write_file(root / "transformer_engine/__init__.py", f"raise RuntimeError\n{moved}")
    if version is not None:
        metadata(root, version, "transformer-engine")
    return root


@pytest.fixture
def examine(world):
    """Audit a place beside others."""
    world.pin(BOTH)

    def known(distribution, release):
        if distribution == "transformer-engine":
            return engine(world.root / "engines" / release, release)
        return world.root / "releases" / release

    def run(target, *others):
        tree = open_tree(str(target), known)
        found = audit(load_matrix(world.matrix), tree, known, [open_tree(str(other), known) for other in others])
        assert as_text(found) and as_markdown(found) and json.dumps(found.to_dict())
        return found

    return run


def of(found, patch="roll-fix"):
    return next(finding for finding in found.findings if finding.id == patch)


@pytest.mark.parametrize(
    ("release", "other", "verdict", "reason"),
    [
        ("0.16.0", "transformer-engine==2.3.0", "apply", "beside transformer-engine 2.3.0 needs it"),
        (
            "0.16.0",
            "transformer-engine==2.1.0",
            "upstream",
            "beside transformer-engine 2.1.0 has fixed this itself (as it was)",
        ),
        ("0.16.0", "transformer-engine==2.0.0", "out-of-range", "beside transformer-engine 2.0.0 lies outside"),
        ("0.18.0", "transformer-engine==2.0.0", "upstream", "its bodies are those of 0.18.0"),
        ("0.16.0", None, "apply", "beside transformer-engine of unknown version needs it"),
    ],
)
def test_a_rule_that_names_both_is_judged_beside_the_release_given(examine, release, other, verdict, reason):
    """And beside one of unknown version where none is given."""
    found = examine(f"megatron-core=={release}", *filter(None, [other]))
    assert of(found).verdict == verdict and reason in of(found).reason
    assert of(found, "faster-forward").verdict == "apply"
    assert found.clean
    assert list(found.to_dict()["audited"]) == ["megatron-core"]
    version = other and other.partition("==")[2]
    assert {name: i["version"] for name, i in found.to_dict()["beside"].items()} == (
        {"transformer-engine": version} if other else {}
    )
    assert (f"  beside transformer-engine {version}" in as_text(found)) is bool(other)
    assert (f", beside transformer-engine {version}" in as_markdown(found)) is bool(other)


def test_a_note_says_what_would_decide(examine):
    """Only where a rule names what is neither audited nor given."""
    note = (
        "roll-fix: also a matter of transformer-engine; judged beside one release of it by --with transformer-engine==X"
    )
    assert examine("==0.16.0").notes == (note,)
    assert examine("==0.16.0", "transformer-engine==2.3.0").notes == ()


def test_the_other_way_round(examine, tmp_path):
    """Of a Transformer Engine, the patches of megatron-core that depend on it, by the bodies of the one beside it."""
    te = engine(tmp_path / "te", "2.3.0")
    found = examine(te)
    assert [(f.id, f.verdict) for f in found.findings] == [("roll-fix", "not-installed")]
    assert "name a release of that with --with megatron-core==X" in of(found).reason
    assert "  not judged        roll-fix: " in as_text(found)
    assert "| roll-fix | not judged |" in as_markdown(found)
    found = examine(te, "==0.16.0")
    assert [(f.id, f.verdict) for f in found.findings] == [("roll-fix", "apply")]
    drifted = megatron(tmp_path / "core", "0.16.3", {"roll.py": EDITED})
    found = examine(te, drifted)
    assert of(found).verdict == "drifted" and not found.clean
    assert [d.diff[-1] for d in of(found).differences] == ["+    return helper(x) + 1"]
    assert of(examine(engine(tmp_path / "old", "2.1.0"), drifted)).verdict == "drifted"
    gone = megatron(tmp_path / "gone", "0.16.3", {"roll.py": "x = 1\n"})
    assert of(examine(te, gone)).verdict == "gone"


def test_others_come_in_every_form(examine, tmp_path):
    """A directory, a wheel, a name; a directory with both gives what the target lacks."""
    target = megatron(tmp_path / "core", "0.16.0", {"roll.py": BROKEN})
    te = engine(tmp_path / "te", "2.1.0")
    wheel = wheel_of(te, tmp_path / "transformer_engine-2.1.0-py3-none-any.whl")
    site = engine(megatron(tmp_path / "site", "0.18.0", {"roll.py": FIXED}), "2.1.0")
    for other in (te, wheel, site, "transformer-engine==2.1.0"):
        found = examine(target, other)
        assert of(found).reason.startswith("megatron-core 0.16.0 beside transformer-engine 2.1.0"), other
        assert of(found).verdict == "upstream" and of(found, "faster-forward").verdict == "apply"
    unknown = examine(target, engine(tmp_path / "bare", None))
    assert of(unknown).verdict == "apply"
    assert unknown.notes == ("transformer-engine: no readable version; judged by bodies alone",)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["==0.17.0"], "megatron-core is there already"),
        (["transformer-engine==2.1.0", "transformer-engine==2.2.0"], "transformer-engine is there already"),
        (["torch==2.0"], "torch is not audited"),
        (["gone"], "nothing to audit"),
    ],
)
def test_others_that_say_nothing_are_wrong_usage(examine, others, message):
    """Nobody would see which of two counts."""
    with pytest.raises(OptionError, match=message):
        examine("==0.16.0", *others)


def test_of_a_pair_only_the_names_that_it_wants_are_lost(examine, tmp_path, monkeypatch):
    """Those of other releases of megatron-core are of no concern to it; of a release that was not measured, all are."""
    wanted = {"transformer_engine:a": ["0.16.0"], "transformer_engine:b": ["0.16.0", "0.17.0"]}
    monkeypatch.setattr(_wanted, "wanted_names", lambda: {n: {"wanted_by": w, "in": []} for n, w in wanted.items()})
    te = engine(tmp_path / "te", "2.3.0")

    def lost(*others):
        return [name.name[-1] for name in examine(te, *others).lost]

    assert lost() == ["a", "b"] and lost("==0.17.0") == ["b"] and lost("==0.18.0") == ["a", "b"]


def states_of_match():
    """The states that match() gives, read from its text."""
    tree = ast.parse(Path(_match.__file__).read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Match"]
    states = [call.args[0] if call.args else next(k.value for k in call.keywords if k.arg == "state") for call in calls]
    return {state.value for state in states if isinstance(state, ast.Constant)} | set(RIGHT)  # others are variables


def test_every_state_of_a_match_has_words():
    """A new state comes to this table, or this fails; the documentation lists each, too."""
    states = states_of_match()
    assert {"apply", "upstream", "not-installed", "out-of-range", "drifted"} <= states
    assert set(VERDICTS) == {*states, "gone"}
    assert set(VERDICTS) >= set(FINE)
    table = (REPOSITORY / "docs/ci.md").read_text("utf-8")
    assert all(f"\n| {words} |" in table for words in VERDICTS.values())
    keys = (REPOSITORY / "docs/cli.md").read_text("utf-8")
    assert all(f'"{verdict}"' in keys for verdict in VERDICTS)


def test_a_verdict_without_words_is_printed_and_not_fine(examine):
    """In the field, an audit with an odd word is better than none."""
    found = examine("==0.16.0")
    odd = replace(found, findings=(Finding("roll-fix", "correctness", "megatron-core", "odd", "so it is"),))
    assert "  odd               roll-fix: so it is" in as_text(odd) and "| roll-fix | odd | so it is |" in as_markdown(
        odd
    )
    assert not odd.clean
