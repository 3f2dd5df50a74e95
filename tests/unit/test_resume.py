"""What a training checkpoint keeps about patches, and the warning when it is not so any more."""

import json
import logging

import pytest
from unit_helpers import BROKEN, PATCH, write_file

import shim
from shim._planning.lock import locked
from shim._planning.resume import differs, state_of


@pytest.fixture
def applied(world, monkeypatch):
    """A world in which shim was applied."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.install(BROKEN)
    shim.apply()
    yield world
    shim.revert()


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_state_is_small_plain_data(applied):
    """It goes into JSON and through torch.load(weights_only=True); the digest stands for the fingerprints."""
    state = shim.checkpoint_state()
    assert json.loads(json.dumps(state)) == state
    assert set(state) == {"digest", "releases", "code", "packages", "patches"}
    assert state["digest"] == shim.status().digest
    patch = state["patches"]["faster-forward"]
    assert patch == {"variant": "only", "options": {"pages": 4}, "code": patch["code"]}
    assert len(patch["code"]) == 16
    assert len(json.dumps(state)) < 4_000


def test_the_same_patches_resume_without_a_word(applied, caplog):
    """From the state, from JSON, or from the digest alone."""
    state = shim.checkpoint_state()
    assert shim.check_resume(state)
    assert shim.check_resume(json.loads(json.dumps(state)))
    assert shim.check_resume(shim.status().digest)
    assert warnings_in(caplog) == []


def test_options_are_the_same_after_json(applied):
    """Whatever a caller gave, what is stored is what comes back."""
    shim.apply(options={"faster-forward": {"pages": 8}})
    state = shim.checkpoint_state()
    assert state["patches"]["faster-forward"]["options"] == {"pages": 8}
    assert shim.check_resume(json.loads(json.dumps(state)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"exclude": "roll-fix"}, "roll-fix: variant old then, none now"),
        (
            {"options": {"faster-forward": {"pages": 8}}},
            "faster-forward: variant only, pages=4 then, variant only, pages=8 now",
        ),
    ],
)
def test_what_differs_is_warned_about(applied, caplog, arguments, said):
    """One warning with both sides and the remedy; training goes on."""
    state = shim.checkpoint_state()
    shim.apply(**arguments)
    caplog.clear()  # what the second call said of the first
    assert shim.check_resume(state) is False
    [text] = warnings_in(caplog)
    assert said in text and "Remedy: " in text


def test_releases_and_bodies_count(applied):
    """Another version, and another body under the same one."""
    state = shim.checkpoint_state()
    plan = applied.plan()
    assert differs(state, plan) == ""
    older = {**state["releases"], "megatron-core": "0.15.0"}
    assert differs({**state, "releases": older}, plan) == "megatron-core: 0.15.0 then, 0.16.0 now"
    assert differs({**state, "releases": {}}, plan).startswith(
        "megatron-core: none then, 0.16.0 now; megatron-shim: none"
    )
    assert differs({**state, "digest": "0" * 16}, plan) == (
        f"digest {'0' * 16} then, {plan.digest} now (bodies, or the matrix, differ)"
    )
    older = json.loads(json.dumps(state["patches"]))
    older["roll-fix"].update(code="0" * 16)
    said = "roll-fix: variant old then, variant old now (its code differs)"
    assert differs({**state, "patches": older}, plan) == said
    older = {**state["code"], "_engine": "0" * 16, "ops": "0" * 16}
    both = f"megatron-shim {shim.__version__} then, {shim.__version__} now"
    assert differs({**state, "code": older}, plan) == f"shim's own code differs (_engine, ops; {both})"
    assert differs({**state, "ops": 1}, plan) == "'ops' then, which this megatron-shim does not know"
    assert differs("0" * 16, plan) == f"digest {'0' * 16} then, {plan.digest} now"


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        [],
        7,
        "",
        {"digest": None},
        {"digest": "x", "releases": [], "patches": "roll-fix"},
        {"releases": {1: 2, "a": None}, "patches": {None: {"options": [1]}, 3: "x"}},
        {"patches": {"roll-fix": {"variant": None, "options": {2: 3, "a": 1}}}},
    ],
)
def test_whatever_a_checkpoint_holds_is_a_difference(applied, caplog, saved):
    """One of before shim, of a later format, or damaged: a warning, never an error that stops the resume."""
    assert shim.check_resume(saved) is False
    assert len(warnings_in(caplog)) == 1


def test_a_checkpoint_without_a_state_is_told_as_such(applied, caplog):
    """checkpoint.get("shim") of one that was written without shim is None."""
    shim.check_resume(None)
    assert "nothing was recorded then" in warnings_in(caplog)[0]


def test_without_apply_both_are_errors(world):
    """They could only say that nothing was wrong."""
    for call in (shim.checkpoint_state, lambda: shim.check_resume("x")):
        with pytest.raises(shim.OptionError, match=r"nothing was applied in this process; call shim\.apply\(\)"):
            call()


def test_the_state_is_part_of_the_lock(applied):
    """Two forms of one thing, which must not drift apart."""
    plan = applied.plan()
    state, lock = state_of(plan), locked(plan)
    assert {name: state[name] for name in ("digest", "releases")} == {n: lock[n] for n in ("digest", "releases")}
    assert set(state["patches"]) == set(lock["patches"])
