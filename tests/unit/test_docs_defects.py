"""docs/defects.md: every patch has a proof with a reproduction, and the record covers every release."""

import pytest

from shim._matrix.load import load_matrix
from shim._proving.results import FAILURES
from shim.maintenance.docs_defects import defects_page, defects_picture, proof_texts, releases_picture
from shim.maintenance.docs_links import linked, short
from shim.maintenance.docs_patches import patch_page
from shim.maintenance.pin_some import without_results
from shim.maintenance.proof_results import as_text, read_proved, read_results, recorded, results_path
from shim.maintenance.prove_all import of_its_time

MATRIX = load_matrix()
PROVED = read_proved(MATRIX)
TEXTS = [text for entry in MATRIX.patches.values() for text in proof_texts(entry)]


@pytest.mark.parametrize("entry", MATRIX.patches.values(), ids=MATRIX.patches)
def test_every_patch_has_a_proof_whose_reproduction_can_be_pasted(entry):
    """Its first line says what is wrong, in one sentence, and the rest how to see it; shim is no part of it."""
    found = proof_texts(entry)
    assert found
    for text in found:
        first, blank, *rest = text.reproduction.splitlines()
        assert first.endswith(".") and blank == "" and rest, text.label
        assert "shim" not in text.reproduction, text.label


def test_the_record_has_every_release_and_no_failure():
    """`make proofs` makes it anew."""
    assert list(PROVED) == list(MATRIX.supported["megatron-core"])
    failures = [
        (release, label, found["verdict"])
        for release, run in PROVED.items()
        for label, found in run["proofs"].items()
        if found["verdict"] in FAILURES
    ]
    assert failures == []


# Proofs whose defect no recorded pair has, and why. Tests of other cells show it.
ELSEWHERE = {
    "mtp-without-te": "only the main branch is wrong",
    "te-cpu-offload/a-model-can-be-built": "only 0.17 with Transformer Engine 2.5 to 2.9 is wrong",
}


@pytest.mark.parametrize("text", TEXTS, ids=[text.label for text in TEXTS])
def test_each_proof_was_run_and_has_shown_its_defect(text):
    """But for those that need a GPU, and those that are named above."""
    verdicts = {run["proofs"][text.label]["verdict"] for run in PROVED.values() if text.label in run["proofs"]}
    assert verdicts, text.label
    if "cpu" in text.keywords.get("devices", ["cpu"]) and text.label not in ELSEWHERE:
        assert "fixed" in verdicts, (text.label, verdicts)


def test_where_a_patch_is_applied_some_proof_of_it_is_fixed():
    """What depends on Transformer Engine too may be right beside the release that was taken.

    A new patch may lack the results of some releases until it is released, but of no variant.
    """
    ran = {(id, release) for id in MATRIX.patches for release in PROVED if release not in without_results(MATRIX, id)}
    lacking = [
        (release, id)
        for release, run in PROVED.items()
        for id, entry in MATRIX.patches.items()
        for pin in [MATRIX.pins["megatron-core"][release].get(id)]
        if entry.distribution == "megatron-core" and pin is not None and pin.variant
        if not any("transformer-engine" in rule.ranges for rule in entry.rules)
        if (id, release) in ran
        if "fixed" not in {f["verdict"] for label, f in run["proofs"].items() if label.partition("/")[0] == id}
    ]
    assert lacking == []
    given = {
        (id, MATRIX.wanted(id, release), (id, release) in ran)
        for id, entry in MATRIX.patches.items()
        for release in PROVED
        if entry.distribution == "megatron-core"
    }
    assert {(id, variant) for id, variant, _ in given} == {(id, variant) for id, variant, seen in given if seen}


def test_the_page_and_its_picture_have_each_proof():
    page, picture = defects_page(MATRIX, PROVED), defects_picture(MATRIX, PROVED)
    for text in TEXTS:
        assert f"(patches/{text.patch}.md#{text.name})" in page and f"shim prove {text.patch}" in page
        assert text.label in picture and f">{text.patch}</text>" in picture
    assert len(picture) < 150_000  # a page loads it


def test_readmes_picture_counts_what_was_measured():
    """By symptom, and small enough for a page that everybody loads."""
    picture = releases_picture(MATRIX, PROVED)
    assert len(picture) < 60_000
    kinds = {text.label: text.keywords.get("defect", "silent") for text in TEXTS}
    for release, run in PROVED.items():
        found = [kinds[label] for label, said in run["proofs"].items() if said["verdict"] == "fixed"]
        assert f"megatron-core {release}: {found.count('silent')} silent" in picture
        takes_more = found.count("memory") + found.count("time")
        assert f"megatron-core {release}: {takes_more} more memory" in picture and f">{len(found)}</text>" in picture


def test_the_page_of_a_patch_has_its_reproductions_and_numbers():
    for entry in MATRIX.patches.values():
        page = patch_page(MATRIX, PROVED, entry)
        for text in proof_texts(entry):
            assert f"### {text.name}\n\n{text.reproduction}\n" in page
            for run in PROVED.values():
                assert text.label not in run["proofs"] or f"| {run['proofs'][text.label]['verdict']} |" in page
        assert all(f"Reported in {linked(who)}" in page for who in entry.met_by)


def test_the_table_says_of_each_defect_where_it_is():
    rows = [line.split(" | ") for line in defects_page(MATRIX, PROVED).splitlines() if "`shim prove " in line]
    rows = [row for row in rows if len(row) == 6]
    assert len(rows) == len(TEXTS)
    for text, (defect, kind, wrong, others, upstream, command) in zip(TEXTS, rows, strict=True):
        entry = MATRIX.patches[text.patch]
        assert text.reproduction.splitlines()[0] in defect and kind == text.keywords.get("defect", "silent")
        assert wrong and (others or wrong != "none that was run")
        assert upstream == "; ".join(map(short, entry.references))
        assert upstream != "none upstream"  # the word for that is "not reported"
        assert f"`shim prove {text.patch}`" in command


def test_releases_are_told_apart_by_what_came_out():
    texts = {text.label: text for text in TEXTS}
    page = defects_page(MATRIX, PROVED)
    for label, cells in {
        "expert-bias-padding/padding-does-not-count-for-the-bias": "0.16.0 to 0.19.2 | not run: 0.12.0 to 0.15.3",
        "masked-microbatch": "0.12.0 to 0.14.0 | right: 0.15.0 to 0.19.2",
        "te-skip-weight-update": "Transformer Engine 2.15.0 to 2.16.1 | ",
    }.items():
        kind = texts[label].keywords.get("defect", "silent")
        assert f"(patches/{texts[label].patch}.md#{texts[label].name}) | {kind} | {cells}" in page


def test_references_become_links():
    place = "https://github.com/NVIDIA/Megatron-LM"
    text = "Megatron-LM issues 6760 and 7452 (the group; open)"
    assert linked(text) == (
        f"Megatron-LM issues [6760]({place}/issues/6760) and [7452]({place}/issues/7452) (the group; open)"
    )
    assert short(text) == f"[Megatron-LM 6760]({place}/issues/6760), [Megatron-LM 7452]({place}/issues/7452), open"
    assert short("Megatron-LM commit 1aef9f8eff (in 0.15)") == f"[Megatron-LM 1aef9f8eff]({place}/commit/1aef9f8eff)"
    assert linked("a fork") == short("a fork") == "a fork" and short("x" * 200) == "see below"
    assert "ROCm/TransformerEngine/issues/715" in linked("ROCm Transformer Engine issue 715")


@pytest.mark.parametrize("entry", MATRIX.patches.values(), ids=MATRIX.patches)
def test_the_results_of_a_patch_are_in_its_folder_with_a_line_for_each(entry):
    """They are of its own proofs, each on a release beside one of Transformer Engine of its time."""
    results = read_results(entry)
    assert results_path(entry).read_text("utf-8") == as_text(results)
    assert set(results) <= {text.label for text in proof_texts(entry)}
    cells = set().union(*results.values())
    assert cells <= {f"{release}+{of_its_time(release)}" for release in MATRIX.supported["megatron-core"]}


def test_each_release_runs_beside_one_of_its_time():
    assert of_its_time("0.11.0") == of_its_time("0.12.0")  # of commits
    assert of_its_time("0.12.0") == "2.3.0" and of_its_time("0.14.0") == "2.5.0" and of_its_time("0.19.2") == "2.20.2"


def said(verdict, stock="", with_shim=""):
    return {"verdict": verdict, "stock": stock, "with_shim": with_shim}


def test_words_and_verdicts_are_kept_and_seconds_are_not():
    sides = {"stock": {"text": "off by 1.0e-02", "seconds": 1.5}, "with_shim": None}
    data = {"a": {"proof": "a-proof", "verdict": "upstream", **sides}, "a/none": {"proof": "", "verdict": ""}}
    assert recorded(data, "0.15.0+2.9.0", {}) == {"a": {"0.15.0+2.9.0": said("upstream", "off by 1.0e-02")}}


def test_the_results_of_one_release_can_be_made_anew():
    """Also beside another Transformer Engine. Those of a proof that is gone go, and of other releases they stay."""
    data = {"a/x": {"proof": "x", "verdict": "fixed", "stock": None, "with_shim": None}}
    before = {"a/x": {"1.0+2.0": said("old"), "1.1+2.0": said("old")}, "a/y": {"1.1+2.0": said("old")}}
    assert recorded(data, "1.1+2.1", before) == {"a/x": {"1.0+2.0": said("old"), "1.1+2.1": said("fixed")}}


def test_releases_with_the_same_result_share_a_line():
    results = {"a": {"1.10+2.0": said("fixed", "x"), "1.9+2.0": said("fixed", "x"), "1.8+2.0": said("upstream")}}
    lines = as_text(results).splitlines()
    assert [line.partition(', "verdict"')[0] for line in lines[2:4]] == [
        '  {"on": ["1.8+2.0"]',
        '  {"on": ["1.9+2.0", "1.10+2.0"]',
    ]
