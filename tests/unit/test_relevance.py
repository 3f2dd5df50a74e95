"""Which patches concern a run: by words that a user names, and by what settings say. Not known is not no."""

import pytest

from shim._configs.settings import MEGATRON, facts_from, names_in
from shim._configs.trainers import TRAINERS
from shim._errors import OptionError
from shim._matrix.concerns import NO, UNKNOWN, WORDS, YES, Run, run_named
from shim._matrix.load import load_matrix

PATCHES = load_matrix().patches
CONCERNS = (("mtp", "packed"), ("cp",))


@pytest.mark.parametrize(
    "facts, concern, missing",
    [
        ({"mtp": True, "packed": True, "cp": False}, YES, ()),
        ({"cp": True}, YES, ()),
        ({"mtp": False, "cp": False}, NO, ()),
        ({"mtp": True, "cp": False}, UNKNOWN, ("packed",)),
        ({"mtp": True}, UNKNOWN, ("packed", "cp")),
        ({}, UNKNOWN, ("mtp", "packed", "cp")),
    ],
)
def test_three_answers(facts, concern, missing):
    run = Run(facts, "")
    assert (run.concern_of(CONCERNS), run.missing_words(CONCERNS)) == (concern, missing)


def test_words_that_alone_would_make_it_a_concern():
    """Neither of a patch that is one already, nor of one that lacks two words."""
    assert run_named("mtp", True).words_that_would(CONCERNS) == ("packed", "cp")
    assert run_named("cp", True).words_that_would(CONCERNS) == ()
    assert run_named("lora", True).words_that_would(CONCERNS[:1]) == ()


def concerned(text, te=True):
    run = run_named(text, te)
    found = {id: run.concern_of(entry.concerns) for id, entry in PATCHES.items()}
    assert UNKNOWN not in found.values()
    return {id for id, concern in found.items() if concern == YES}


def test_a_dense_model_with_lora_and_a_mixture_of_experts_are_told_apart():
    dense, moe = concerned("lora,recompute"), concerned("moe,ep,recompute")
    assert "frozen-recompute" in dense and not {"moe-aux-loss-scale", "router-replay", "mtp-recompute"} & dense
    assert "expert-bias-padding" not in dense and "frozen-recompute" not in moe
    assert {"mtp-packed-sequences", "mtp-recompute"} <= concerned("mtp,packed,recompute") - concerned(
        "mtp,recompute"
    ) | {"mtp-recompute"}


def test_what_is_installed_counts():
    assert "te-moved-symbols" in concerned("tp") and "te-moved-symbols" not in concerned("tp", te=False)


@pytest.mark.parametrize(
    "text, words", [("THD, peft", "packed, lora"), ("sequence-parallel sp", None), ("sp", "tp, sp"), ("fp4", "fp8")]
)
def test_other_names_are_taken_and_unknown_words_are_refused(text, words):
    if words is None:
        with pytest.raises(OptionError, match="'sequence-parallel'"):
            run_named(text, True)
    else:
        assert run_named(text, True).words == f"a run with {words}"


def test_a_typing_error_gets_a_suggestion():
    with pytest.raises(OptionError, match="did you mean 'packed'"):
        run_named("paked", True)
    with pytest.raises(OptionError, match="--for is empty"):
        run_named(" , ", True)
    with pytest.raises(OptionError, match="'te'"):  # that is seen, and not said
        run_named("te", True)


def facts_of(**settings):
    return facts_from(lambda name: [settings[name]] if name in settings else [])


@pytest.mark.parametrize(
    "settings, facts",
    [
        ({"mtp_num_layers": None}, {"mtp": False}),
        ({"mtp_num_layers": 1}, {"mtp": True}),
        ({"num_moe_experts": "8"}, {"moe": True}),
        ({"tensor_model_parallel_size": 1}, {"tp": False}),
        ({"tensor_model_parallel_size": "2"}, {"tp": True}),
        ({"tensor_model_parallel_size": "$TP"}, {"tp": False}),
        ({"recompute_granularity": "none"}, {"recompute": False}),
        ({"recompute_granularity": "full"}, {"recompute": True}),
        ({"cross_entropy_fusion_impl": "te"}, {}),
        ({"cross_entropy_fusion_impl": "te", "cross_entropy_loss_fusion": True}, {"fused-loss": True}),
        ({"cross_entropy_fusion_impl": "native", "cross_entropy_loss_fusion": True}, {"fused-loss": False}),
        ({"optimizer": "dist_muon"}, {"muon": True}),
        ({"seed": 1}, {}),
    ],
)
def test_settings_decide_what_they_are_about_and_nothing_else(settings, facts):
    assert facts_of(**settings) == facts


def test_each_word_that_settings_decide_is_one_of_the_matrix():
    of_config = {"any", "own-code", "config-override", "te", "no-te", "padding-mask", "lora", "checkpoint", "datasets"}
    assert set(WORDS) - set(MEGATRON) == of_config and set(MEGATRON) <= set(WORDS)
    for trainer in TRAINERS:
        assert {*trainer.table, *trainer.by_default, *trainer.implied} <= set(WORDS)
        # Each condition can be read.
        assert names_in({**trainer.table, "": (*trainer.with_megatron, *trainer.without)})
