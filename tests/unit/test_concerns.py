"""`concerns` says which models and runs a patch concerns, `symptom` what goes wrong; its proofs show both."""

import re

import pytest
from unit_helpers import REPOSITORY

from shim._matrix.concerns import WORDS
from shim._matrix.load import load_matrix
from shim._matrix.model import SYMPTOMS
from shim.maintenance.docs_defects import proof_texts

PATCHES = load_matrix().patches
# What a proof asks for, and the word that the patch has to have then.
ASKED = {
    "moe": r"\bnum_moe_experts\b",
    "mtp": r"\bmtp_num_layers=[1-9]",
    "mla": r"\bMLATransformerConfig\b",
    "recompute": r"\brecompute_granularity\b",
    "lora": r"\brequires_grad_\(False\)|\badapted\b",
}
# In these proofs it is one case of several.
BESIDE = {
    # Layers of moved-symbols have experts so that they can be told apart; a clamp concerns dense layers too.
    "moe": {"moved-symbols", "clamped-activations"},
    "mtp": {"fused-linear-logprob", "checkpoint-non-tensors", "router-padding-mask"},
    "mla": {"dsa-indexer-gradient"},  # "dsa" says it
    "recompute": {"router-replay", "mla-rope-key-gradient"},
    "lora": {"main-param-names", "tp-attributes", "te-frozen-experts"},  # who freezes some experts has no adapters
}


def proof_of(id):
    place = REPOSITORY.joinpath("patches", *PATCHES[id].module.split(".")[2:])
    return "".join(file.read_text("utf-8") for file in sorted(place.glob("*proof.py")))


def test_each_patch_says_whom_it_concerns():
    assert all(entry.concerns for entry in PATCHES.values())


@pytest.mark.parametrize("id", PATCHES)
def test_the_symptom_of_a_patch_is_the_worst_that_its_proofs_show(id):
    """Time comes last, and has no word among the symptoms: it is told with memory."""
    shown = {text.keywords.get("defect", "silent") for text in proof_texts(PATCHES[id])}
    worst = min(shown, key=(*SYMPTOMS, "time").index)
    assert PATCHES[id].symptom == {"time": "memory"}.get(worst, worst)


def test_each_word_is_used_or_one_that_a_user_asks_with():
    used = {word for entry in PATCHES.values() for words in entry.concerns for word in words}
    assert set(WORDS) - used <= {"ep"}


@pytest.mark.parametrize("word", ASKED)
def test_what_a_proof_needs_is_said(word):
    asking = {id for id in PATCHES if re.search(ASKED[word], proof_of(id))} - BESIDE.get(word, set())
    assert {id for id in asking if not any(word in words for words in PATCHES[id].concerns)} == set()
    assert asking
