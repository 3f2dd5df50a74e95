"""Arguments and MEGATRON_SHIM_ variables: which of them wins, and what is refused."""

import re
from pathlib import Path

import pytest

import shim
from shim._errors import MatrixError, OptionError
from shim._matrix.load import load_matrix
from shim._planning.options import VARIABLES, Options, matrix_argument, resolve, unknown_variables
from shim._printing.printable import nearest


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


def test_kinds_yield_to_the_argument(asked):
    """Also to None, which means all, and to an empty list, which means none."""
    assert asked({"KINDS": "compat, feature"}).kinds == frozenset({"compat", "feature"})
    assert asked({"KINDS": "none"}).kinds == frozenset()
    assert asked(kinds=["performance"]).kinds == frozenset({"performance"})
    assert asked(kinds=None).kinds is None


def test_options_yield_to_the_argument(asked):
    """As a whole; the variable holds JSON."""
    assert asked({"OPTIONS": '{"faster-forward": {"pages": 8}}'}).options == {"faster-forward": {"pages": 8}}
    assert asked(options={"faster-forward": {"pages": 2}}).options == {"faster-forward": {"pages": 2}}
    assert asked(options=None).options == asked(options={}).options == {}


@pytest.mark.parametrize(
    ("variable", "text", "name", "default"),
    [
        ("ONLY", "roll-fix", "only", None),
        ("REQUIRE", "roll-fix", "require", ()),
        ("KINDS", "compat", "kinds", None),
        ("STRICT", "1", "strict", False),
        ("ON_DRIFT", "apply", "on_drift", "skip"),
        ("OPTIONS", '{"faster-forward": {"pages": 8}}', "options", None),
        ("LOCK", "some.lock", "lock", None),
    ],
)
def test_an_argument_with_its_default_value_outranks_the_variable(asked, variable, text, name, default):
    """A trainer that says strict=False means it."""
    assert asked(**{name: default}) == asked()
    assert asked({variable: text}) != asked(**{name: default})
    assert asked(**{name: default}) == Options()


def test_none_is_an_empty_list(asked):
    """In variables, where an empty one is as if unset."""
    assert asked({"ONLY": "none"}).only == frozenset()


def test_strict_comes_from_either(asked):
    """Where it is not given, the variable counts."""
    assert asked(strict=True).strict
    assert asked({"STRICT": "1"}).strict
    assert not asked(strict=False).strict
    assert not asked({"STRICT": "0"}).strict
    assert asked(strict=True).strict


def test_on_drift_yields_to_the_argument(asked):
    assert asked({"ON_DRIFT": "apply"}).on_drift == "apply"
    assert asked(on_drift="error").on_drift == "error"
    assert asked(on_drift="skip").on_drift == "skip"


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
            "name 'page', .*; it has pages; did you mean 'pages'?",
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


@pytest.mark.parametrize("strict", ["false", "", 0, 1, None, []])
def test_strict_is_true_or_false(asked, strict):
    """To Python "false" is true; a mistake must not decide in silence."""
    with pytest.raises(OptionError, match=r"strict is .*; it must be True or False"):
        asked(strict=strict)


@pytest.mark.parametrize(
    "arguments",
    [
        {"only": 7},
        {"only": b"roll-fix"},
        {"require": [None]},
        {"kinds": True},
        {"on_drift": None},
        {"on_drift": ["skip"]},
        {"options": "faster-forward"},
        {"options": [("faster-forward", {})]},
        {"options": {"faster-forward": None}},
        {"options": {"faster-forward": "pages"}},
        {"options": {7: {}}},
        {"options": {"faster-forward": {7: 8}}},
        {"lock": 7},
    ],
)
def test_what_is_of_another_type_is_no_other_error(asked, arguments):
    """Callers catch ShimError."""
    with pytest.raises(OptionError):
        asked(**arguments)


@pytest.mark.parametrize(
    "text", ["pages", "[]", "7", "{", '{"faster-forward": 7}', "[" * 100_000, '{"a": {}, "a": {}}']
)
def test_a_variable_that_holds_no_options_is_named(asked, text):
    with pytest.raises(OptionError, match="MEGATRON_SHIM_OPTIONS"):
        asked({"OPTIONS": text})


def test_lists_of_arguments_are_split_too(asked):
    """As users write them, having seen the variables."""
    assert asked(only="roll-fix,faster-forward").only == BOTH
    assert asked(exclude=["roll-fix faster-forward"]).exclude == BOTH
    assert asked(kinds="compat, feature").kinds == frozenset({"compat", "feature"})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mtp-", ["mtp-loss-cp", "mtp-recompute", "mtp-without-te"]),
        ("packed", ["mla-packed-rope", "packed-seq-aux-loss"]),
        ("paged_stash", ["paged-stash"]),
        ("Paged-Stash", ["paged-stash"]),
        ("stash", ["paged-stash"]),
        ("my-paged-stash", ["paged-stash"]),
        ("mtp-recompte", ["mtp-recompute"]),
        ("recompute", ["mtp-recompute", "frozen-recompute", "fp8-fp4-recompute"]),
        ("zzz", []),
        ("te", []),
        ("", []),
    ],
)
def test_the_nearest_name_holds_the_wrong_one_or_is_a_few_edits_away(name, found):
    assert nearest(name, load_matrix().patches)[: len(found) or None] == found


def test_unknown_variables_are_warned_about(monkeypatch):
    """A misspelt one would do nothing, in silence."""
    for name in ("EXCLUDES", "ON-DRIFTT", "CACHE", "RAY_NEXT_HOOK", "LOCK"):
        monkeypatch.setenv("MEGATRON_SHIM_" + name, "x")
    monkeypatch.setenv("MEGATRONSHIM_LOCK", "x")
    excludes, drift = unknown_variables()  # in the order of their names
    assert "MEGATRON_SHIM_EXCLUDES means nothing to shim; did you mean 'MEGATRON_SHIM_EXCLUDE'" in excludes
    assert "MEGATRON_SHIM_ON-DRIFTT means nothing to shim; did you mean 'MEGATRON_SHIM_ON_DRIFT'" in drift


# What the matrix declares of options


@pytest.mark.parametrize(
    ("patch", "name", "value", "message"),
    [
        ("paged-stash", "moe_paged_stash_page_size", -1, "is -1; it must be an integer, at least 1, at most 65536"),
        ("paged-stash", "moe_paged_stash_page_size", 0, "an integer, at least 1"),
        ("paged-stash", "moe_paged_stash_page_size", True, "is True; it must be an integer"),
        ("paged-stash", "moe_paged_stash_page_size", "64", "is '64'; it must be an integer"),
        ("paged-stash", "moe_paged_stash_page_size", 64.0, "an integer"),
        ("paged-stash", "moe_paged_stash_page_size", None, "an integer"),
        ("paged-stash", "moe_paged_stash_buffer_size_factor_cuda", float("nan"), "is nan; it must be a finite number"),
        ("paged-stash", "moe_paged_stash_buffer_size_factor_cpu", float("-inf"), "a finite number"),
        ("paged-stash", "moe_paged_stash_buffer_size_factor_cpu", 10**400, "a finite number"),
        ("paged-stash", "moe_paged_stash_buffer_size_factor_cpu", False, "a finite number"),
        ("paged-stash", "overflow", "spil", "one of keep, spill, raise; did you mean 'spill'?"),
        ("paged-stash", "overflow", 4, "one of keep, spill, raise"),
        ("paged-stash", "moe_paged_stash", "false", "is 'false'; it must be True or False"),
        ("paged-stash", "moe_paged_stash", 1, "is 1; it must be True or False"),
        ("chunked-logprob", "fp32_output", "no", "is 'no'; it must be True or False"),
        ("mtp-packed-sequences", "partition", "banana", "is 'banana'; it must be one of sequence, row"),
        ("te-cpu-offload", "set_variable", 0, "True or False"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_an_error_at_plan_time(patch, name, value, message):
    """With the shipped matrix, whatever is installed; it would reach a training step otherwise."""
    with pytest.raises(OptionError, match=f"options of {patch}: {name} .*{re.escape(message)}"):
        shim.plan(options={patch: {name: value}})


def test_values_of_the_right_type_pass():
    """The defaults do; a whole number is a number, and the same one."""
    matrix = load_matrix()
    for id, entry in matrix.patches.items():
        assert resolve(matrix, options={id: dict(entry.options)}).options[id] == entry.options
    given = {"paged-stash": {"moe_paged_stash_buffer_size_factor_cuda": 2}}
    factor = resolve(matrix, options=given).options["paged-stash"]["moe_paged_stash_buffer_size_factor_cuda"]
    assert factor == 2.0 and isinstance(factor, float)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("{type: int}", "lacks 'default'"),
        ("{default: 4, least: 1}", "unknown key 'least'"),
        ("{default: null}", "no default to tell its type"),
        ("{default: null, type: integer}", "one of bool, int, float, str"),
        ("{default: 4, type: str}", "the default of pages is 4; it must be text"),
        ("{default: 4, minimum: 5}", "the default of pages is 4; it must be an integer, at least 5"),
        ("{default: 4, above: 4}", "an integer, above 4"),
        ("{default: a, choices: [b]}", "one of b"),
        ("{default: 4, choices: [a]}", "choices belong to text"),
        ("{default: a, minimum: 1}", "minimum, above, maximum to numbers"),
        ("{default: 4, minimum: true}", "minimum of pages must be a finite number"),
        ("{default: 4, maximum: .inf}", "maximum of pages must be a finite number"),
    ],
)
def test_a_declaration_that_cannot_be_is_a_matrix_error(world, declared, message):
    world.matrix.write_text(world.matrix.read_text().replace("{pages: 4}", f"{{pages: {declared}}}"))
    with pytest.raises(MatrixError, match=re.escape(message)):
        load_matrix(world.matrix)


def test_an_option_without_a_default_takes_none(world):
    """And nothing else that is not of its type."""
    declared = "{default: null, type: int, minimum: 1}"
    world.matrix.write_text(world.matrix.read_text().replace("{pages: 4}", f"{{pages: {declared}}}"))
    option = load_matrix(world.matrix).patches["faster-forward"].declared["pages"]
    assert option.takes == "an integer, at least 1, or None"
    assert [option.checked(value) for value in (None, 3)] == [None, 3]
    with pytest.raises(ValueError, match="is 0; it must be"):
        option.checked(0)


def test_one_id_may_stand_without_a_list(asked):
    """only="a" means that patch, not the letters of its id."""
    assert asked(only="roll-fix").only == ROLL
    assert asked(kinds="compat").kinds == frozenset({"compat"})


def test_options_of_a_patch_join_its_defaults(asked, world):
    """What is not given is as in the matrix."""
    assert world.plan()["faster-forward"].options == {"pages": 4}
    assert world.plan(options={"faster-forward": {"pages": 8}})["faster-forward"].options == {"pages": 4} | {"pages": 8}
