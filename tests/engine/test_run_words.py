"""concerns= and rounding=: what concerns a run, what may change rounding, and what a model needs beyond the words."""

import pytest

import shim
from shim._errors import NotMetError, OptionError

OPS = "megatron.core.ops:"


class Module:
    """What check() asks of a model: a module with a config, whose weights are frozen or not."""

    def __init__(self, frozen=False, **config):
        self.config = type("Config", (), {"num_attention_heads": 2, **config})()
        self.weight = type("Weight", (), {"requires_grad": not frozen})()

    def modules(self):
        return [self]

    def parameters(self):
        return [self.weight]


def imported(world):
    world.get("ops:double"), world.get("other:other")
    return world


@pytest.fixture
def concerned(world):
    world.patch("any-run", [OPS + "double"], concerns=["any"])
    world.patch("of-experts", [OPS + "halve"], concerns=["moe"])
    world.patch("of-mtp", ["megatron.core.other:other"], concerns=["mtp+packed", "mtp+cp"])
    return imported(world)


def states(**arguments):
    return {id: patch.state for id, patch in shim.apply(**arguments).patches.items()}


def test_what_concerns_none_of_the_words_is_left_out(concerned):
    assert states(concerns="moe") == {"any-run": "applied", "of-experts": "applied", "of-mtp": "not-concerned"}
    assert states(concerns=["mtp", "packed"])["of-mtp"] == "applied"
    assert states(concerns="packed") == {
        "any-run": "applied",
        "of-experts": "not-concerned",
        "of-mtp": "not-concerned",
    }
    said = shim.plan(concerns="packed")["of-mtp"].reason
    assert said == "it concerns mtp+packed or mtp+cp, and concerns names packed"
    assert set(states().values()) == {"applied"}


def test_the_variable_says_the_same_and_yields_to_the_argument(concerned, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_CONCERNS", "moe")
    assert states()["of-mtp"] == "not-concerned"
    assert states(concerns=None)["of-mtp"] == "applied"
    assert shim.run_environment(concerns="mtp,cp")["MEGATRON_SHIM_CONCERNS"] == "mtp,cp"


def test_what_is_required_by_its_name_concerns_every_run(concerned):
    assert states(concerns="moe", require="of-mtp")["of-mtp"] == "applied"


@pytest.mark.parametrize(
    ("words", "told"), [("moee", "'moee'; did you mean 'moe'"), ("", "is empty"), ((), "is empty")]
)
def test_words_that_mean_nothing_are_an_error(concerned, words, told):
    with pytest.raises(OptionError, match=rf"concerns .*{told}"):
        shim.plan(concerns=words)


def test_check_names_what_a_model_needs_beyond_the_words(concerned, caplog):
    shim.apply(concerns="packed", strict=True)
    shim.check(Module())
    assert not caplog.records
    with pytest.raises(NotMetError, match=r"this model needs of-experts .*concerns=packed leaves out"):
        shim.check(Module(num_moe_experts=4))
    shim.apply(concerns="packed")
    caplog.clear()
    shim.check(Module(num_moe_experts=4, mtp_num_layers=1))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "this model needs of-experts" in said and "it may need 1 more" in said and "Remedy: name all" in said


def test_a_lock_keeps_the_words(concerned, tmp_path):
    lock = tmp_path / "shim.lock"
    from shim._planning.lock import write_lock

    assert write_lock(lock, shim.plan(concerns="moe"))["concerns"] == ["moe"]
    assert states(lock=lock)["of-mtp"] == "not-concerned"
    with pytest.raises(NotMetError, match="concerns: moe in the lock, mtp, packed here"):
        shim.apply(lock=lock, concerns="mtp,packed")


def test_another_call_with_other_words_is_told(concerned, caplog):
    shim.apply()
    shim.apply(concerns="moe")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no longer applied: of-mtp" in said and "concerns names moe, and named all runs" in said


# Rounding


@pytest.fixture
def rounding(world):
    world.patch("faster", [OPS + "double"], kind="performance", changes="rounding")
    source = (
        "import functools\nSEEN = []\n"
        + """
def bindings(variant, options):
    SEEN.append(options["rounding"])
    return {target: lambda original: functools.wraps(original)(lambda *a, **k: original(*a, **k)) for target in TARGETS}
"""
    )
    world.patch("fix", [OPS + "halve"], source, options={"rounding": False}, changes="values")
    world.patch("broken", ["megatron.core.other:other"], changes="rounding")
    return imported(world)


def test_what_changes_rounding_where_stock_is_right_is_asked_for(rounding, monkeypatch):
    assert states() == {"faster": "excluded", "fix": "applied", "broken": "applied"}
    assert "was not asked for (rounding=True)" in shim.plan()["faster"].reason
    assert states(rounding=True)["faster"] == states(require="faster")["faster"] == "applied"
    monkeypatch.setenv("MEGATRON_SHIM_ROUNDING", "1")
    assert states()["faster"] == "applied" and states(rounding=False)["faster"] == "excluded"


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ({}, False),
        ({"rounding": True}, True),
        ({"require": "fix"}, True),
        ({"rounding": True, "options": {"fix": {"rounding": False}}}, False),
    ],
)
def test_a_fix_that_can_also_round_is_told_whether_it_may(rounding, arguments, asked):
    assert shim.plan(**arguments)["fix"].options == {"rounding": asked}


def test_no_longer_asking_for_rounding_is_told(rounding, caplog):
    shim.apply(rounding=True)
    shim.apply()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "rounding is not asked for any more" in said


def test_rounding_is_a_flag(rounding):
    with pytest.raises(OptionError, match=r"rounding is 'yes'; it must be True or False"):
        shim.plan(rounding="yes")
