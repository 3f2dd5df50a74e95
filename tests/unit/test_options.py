"""Arguments and MEGATRON_SHIM_ variables: which of them wins, and what is refused."""

from pathlib import Path

import pytest

from shim._errors import OptionError
from shim._matrix import load_matrix
from shim._options import VARIABLES, matrix_argument, resolve


@pytest.fixture
def asked(world, monkeypatch):
    """Resolve arguments under MEGATRON_SHIM_ variables given by their short names."""
    matrix = load_matrix(world.matrix)

    def ask(variables=None, **arguments):
        for name, value in (variables or {}).items():
            assert "MEGATRON_SHIM_" + name in VARIABLES
            monkeypatch.setenv("MEGATRON_SHIM_" + name, value)
        return resolve(matrix, **arguments)

    return ask


BOTH = frozenset({"roll-fix", "faster-forward"})
ROLL, FASTER = frozenset({"roll-fix"}), frozenset({"faster-forward"})


def test_nothing_asked_for_means_everything(asked):
    """All patches, all kinds, no requirement, and drift is skipped."""
    options = asked()
    assert (options.only, options.kinds, options.exclude, options.require) == (None, None, frozenset(), frozenset())
    assert (options.strict, options.on_drift, options.disabled) == (False, "skip", False)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_disable_always_wins(asked, text):
    """Whoever runs the job can turn everything off, whatever the trainer passes."""
    assert asked({"DISABLE": text}, only=["roll-fix"], require=["roll-fix"]).disabled


@pytest.mark.parametrize("text", ["0", "false", "no", "off", ""])
def test_disable_can_say_no(asked, text):
    """As variables in job files do."""
    assert not asked({"DISABLE": text}).disabled


def test_exclude_always_wins(asked):
    """It adds to the argument, and takes a requirement of the trainer back."""
    options = asked({"EXCLUDE": "roll-fix"}, exclude=["faster-forward"], require=["roll-fix", "faster-forward"])
    assert options.exclude == BOTH
    assert options.require == FASTER


@pytest.mark.parametrize("text", ["roll-fix,faster-forward", "roll-fix faster-forward", " roll-fix ,\tfaster-forward,"])
def test_lists_are_separated_by_commas_or_spaces(asked, text):
    """Both are common in job files."""
    assert asked({"EXCLUDE": text}).exclude == BOTH


def test_only_yields_to_the_argument(asked):
    """Also to an empty list, which means none."""
    assert asked({"ONLY": "roll-fix"}).only == ROLL
    assert asked(only=["faster-forward"]).only == FASTER
    assert asked(only=[]).only == frozenset()


@pytest.mark.parametrize("text", ["", " ", ","])
def test_an_empty_only_is_as_if_unset(asked, text):
    """An empty variable must not turn everything off in silence."""
    assert asked({"ONLY": text}).only is None


def test_require_yields_to_the_argument(asked):
    """A trainer that requires something has said what."""
    assert asked({"REQUIRE": "roll-fix"}).require == ROLL
    assert asked(require=["faster-forward"]).require == FASTER


def test_strict_comes_from_either(asked):
    """The argument's False is its default, so the variable can only add."""
    assert asked(strict=True).strict
    assert asked({"STRICT": "1"}).strict
    assert not asked({"STRICT": "0"}).strict
    assert asked(strict=True).strict


def test_on_drift_yields_to_the_argument(asked):
    """All but the default "skip" outrank the variable."""
    assert asked({"ON_DRIFT": "apply"}).on_drift == "apply"
    assert asked(on_drift="error").on_drift == "error"


def test_matrix_yields_to_the_argument(monkeypatch):
    """None stands for the matrix that ships with shim."""
    assert matrix_argument(None) is None
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", "/from/variable.yaml")
    assert matrix_argument(None) == "/from/variable.yaml"
    assert matrix_argument("/from/argument.yaml") == "/from/argument.yaml"


def test_lock_yields_to_the_argument(asked):
    """Both are paths, which may be relative; whether the file is a lock is seen when it is enforced."""
    assert asked().lock is None
    assert asked(lock=Path("from/argument.lock")).lock == "from/argument.lock"
    assert asked({"LOCK": "from/variable.lock"}).lock == "from/variable.lock"
    assert asked(lock="from/argument.lock").lock == "from/argument.lock"


def test_an_empty_lock_variable_is_as_if_unset(asked):
    """As job files leave it; an empty argument is a mistake of the caller's, and names no lock."""
    assert asked({"LOCK": ""}).lock is None
    assert asked(lock="").lock == ""


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({}, {"only": ["roll-fx"]}, "only names 'roll-fx', which is not a patch; did you mean 'roll-fix'?"),
        ({}, {"exclude": "zzz"}, "exclude names 'zzz', which is not a patch; known are roll-fix, faster-forward"),
        ({}, {"require": ["rollfix"]}, "require names 'rollfix'.*did you mean 'roll-fix'"),
        ({"EXCLUDE": "roll_fix"}, {}, "MEGATRON_SHIM_EXCLUDE names 'roll_fix'.*did you mean 'roll-fix'"),
        ({"ONLY": "roll-fix;x"}, {}, "MEGATRON_SHIM_ONLY names"),
        ({"REQUIRE": "gone"}, {}, "MEGATRON_SHIM_REQUIRE names 'gone'"),
        ({}, {"options": {"gone": {}}}, "options names 'gone'"),
        ({}, {"options": {"roll-fix": {"pages": 1}}}, "options of roll-fix name 'pages'.*no options"),
        (
            {},
            {"options": {"faster-forward": {"page": 1}}},
            "name 'page', .* there is one of pages; did you mean 'pages'?",
        ),
        ({}, {"kinds": ["correct"]}, "kinds names 'correct'; it must be one of correctness, compat"),
        ({}, {"on_drift": "raise"}, "on_drift is 'raise'; it must be one of skip, error, apply"),
        ({"ON_DRIFT": "raise"}, {}, "MEGATRON_SHIM_ON_DRIFT is 'raise'"),
        ({"STRICT": "maybe"}, {}, "MEGATRON_SHIM_STRICT='maybe' is neither"),
        ({"DISABLE": "2"}, {}, "MEGATRON_SHIM_DISABLE='2' is neither"),
    ],
)
def test_what_is_not_usable_is_an_error_that_helps(asked, variables, arguments, message):
    """Nothing unknown passes in silence; the message names it and what is known."""
    with pytest.raises(OptionError, match=message):
        asked(variables, **arguments)


def test_one_id_may_stand_without_a_list(asked):
    """only="a" means that patch, not the letters of its id."""
    assert asked(only="roll-fix").only == ROLL
    assert asked(kinds="compat").kinds == frozenset({"compat"})


def test_options_of_a_patch_join_its_defaults(asked, world):
    """What is not given is as in the matrix."""
    assert world.plan()["faster-forward"].options == {"pages": 4}
    assert world.plan(options={"faster-forward": {"pages": 8}})["faster-forward"].options == {"pages": 4} | {"pages": 8}
