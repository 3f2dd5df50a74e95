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
    assert said == "it concerns mtp+packed or mtp+cp, and this run has no mtp, cp"
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


# Of verl, whose default of each size is 1. It does not say whether there are experts.
VERL = """
actor_rollout_ref:
  actor: {megatron: {tensor_model_parallel_size: 2, override_transformer_config: {mtp_num_layers: 1}}}
  model: {use_remove_padding: false}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "a run.yaml"
    file.write_text(VERL)
    return file


def test_a_file_leaves_out_only_what_it_excludes(concerned, config):
    right = {"any-run": "applied", "of-experts": "applied", "of-mtp": "not-concerned"}
    assert states(concerns=config) == states(concerns=str(config)) == states(concerns=[config]) == right
    said = shim.plan(concerns=config)
    assert said["of-mtp"].reason == "it concerns mtp+packed or mtp+cp, and this run has no packed, cp"
    assert "; counted too, as not known: " in str(said) and " moe," in str(said)
    assert states(concerns=[config, "cp"])["of-mtp"] == "applied"


def test_other_processes_get_the_words_of_a_file(concerned, config, monkeypatch):
    """They may work in another folder, or on a machine that lacks the file."""
    words = shim.run_environment(concerns=config)["MEGATRON_SHIM_CONCERNS"]
    assert "mtp" in words.split(",") and "packed" not in words.split(",")
    assert shim.plan(concerns=words).options == shim.plan(concerns=config).options
    monkeypatch.setenv("MEGATRON_SHIM_CONCERNS", str(config))
    assert states()["of-mtp"] == "not-concerned"
    assert shim.ray_runtime_env()["env_vars"]["MEGATRON_SHIM_CONCERNS"] == words


def test_a_run_without_megatron_is_concerned_by_what_concerns_every_run(concerned, tmp_path):
    (tmp_path / "run.yaml").write_text("actor_rollout_ref: {actor: {strategy: fsdp, fsdp_config: {x: 1}}}")
    words = shim.run_environment(concerns=tmp_path / "run.yaml")["MEGATRON_SHIM_CONCERNS"]
    for said in (tmp_path / "run.yaml", words):
        assert states(concerns=said) == {
            "any-run": "applied",
            "of-experts": "not-concerned",
            "of-mtp": "not-concerned",
        }


def test_a_word_stays_a_word_beside_a_file_of_its_name(concerned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe").write_text(VERL)
    (tmp_path / "arguments").write_text(VERL)
    assert states(concerns="moe")["of-mtp"] == "not-concerned" == states(concerns="arguments")["of-mtp"]
    assert shim.plan(concerns="moe").options.concerns == ("moe",)
    assert len(shim.plan(concerns="arguments").options.concerns) > 5


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("run.yaml", r"names the file 'run.yaml', which is not there. Remedy: give the path"),
        ("configs/run", "names the file"),
        (["moe", "mtp.packed"], "names the file 'mtp.packed'"),
        ("arguments", "does not know 'arguments'"),
        ("empty.yaml", "empty.yaml has no settings"),
    ],
)
def test_what_is_neither_a_word_nor_a_file_is_an_error(concerned, tmp_path, monkeypatch, given, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(OptionError, match=rf"^concerns .*{told}"):
        shim.plan(concerns=given)


def test_a_lock_names_no_file(concerned, tmp_path, config):
    lock = tmp_path / "shim.lock"
    from shim._planning.lock import write_lock

    kept = write_lock(lock, shim.plan(concerns=config))["concerns"]
    assert "packed" not in kept and states(lock=lock)["of-mtp"] == "not-concerned"
    lock.write_text(lock.read_text().replace('"moe"', f'"{config.name.replace(" ", "_")}"'))
    with pytest.raises(OptionError, match=r"does not know 'a_run\.yaml'"):
        shim.plan(lock=lock)


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
