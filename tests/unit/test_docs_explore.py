"""docs/explore.html: its data are what the matrix and the record say, and it needs nothing from elsewhere.

tests/integration/test_explore.py looks at it in a browser.
"""

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from explored import CORE, TE, hits
from packaging.version import Version

from shim._matrix.concerns import WORDS
from shim._matrix.load import load_matrix
from shim._matrix.model import NOT_NEEDED, UPSTREAM
from shim._te.features import losses_of
from shim.maintenance.docs_defects import proof_texts
from shim.maintenance.docs_explore import ANSWERED, GROUPS, PARTS, PRESETS, VERDICTS, explore_data, explore_page
from shim.maintenance.docs_links import linked, segments
from shim.maintenance.proof_results import read_proved

MATRIX = load_matrix()
PROVED = read_proved(MATRIX)
DATA = explore_data(MATRIX, PROVED)
PATCHES = {patch["id"]: patch for patch in DATA["patches"]}
CORES, TES = MATRIX.supported[CORE], MATRIX.supported[TE]


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts = [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag in ("script", "style"):
            self.texts.setdefault(attributes.get("id", tag), data)


def gives(patch, letter):
    names = {"u": UPSTREAM, "n": NOT_NEEDED}
    return names.get(letter) or list(MATRIX.patches[patch].variants)[ord(letter) - ord("A")]


@pytest.mark.parametrize("id", PATCHES)
def test_each_state_is_what_the_rules_say(id):
    """For each pair of releases; and for each release that alone decides, what its pin says."""
    entry, patch = MATRIX.patches[id], PATCHES[id]
    for place, core in enumerate(CORES):
        for other, te in enumerate(TES):
            rule = entry.rule_for({CORE: Version(core), TE: Version(te)})
            row = patch["states"][place if patch["by"] == [0, 1] else 0]
            letter = row[place if patch["by"] == [0] else other]
            assert gives(id, letter) == (NOT_NEEDED if rule is None else rule.gives), (core, te)
    if len(patch["by"]) == 1:
        name = (CORE, TE)[patch["by"][0]]
        for release, letter in zip(MATRIX.supported[name], patch["states"][0], strict=True):
            pin = MATRIX.pins[name][release].get(id)
            assert (gives(id, letter) if letter.isupper() else None) == (pin and pin.variant), release


def test_each_result_of_the_record_is_there_once():
    found = {release: {} for release in CORES}
    for patch in DATA["patches"]:
        for proof in patch["proofs"]:
            for first, number, verdict, stock, shim in proof["runs"]:
                said = {"verdict": VERDICTS[verdict], "stock": DATA["texts"][stock], "with_shim": DATA["texts"][shim]}
                for release in CORES[first : first + number]:
                    assert proof["label"] not in found[release]
                    found[release][proof["label"]] = said
    assert found == {release: run["proofs"] for release, run in PROVED.items()}
    assert [TES[place] for place in DATA["beside"]] == [PROVED[release][TE] for release in CORES]


@pytest.mark.parametrize("id", PATCHES)
def test_each_patch_is_told_as_its_file_tells_it(id):
    entry, patch = MATRIX.patches[id], PATCHES[id]
    assert (patch["summary"], patch["changes"], patch["symptom"]) == (entry.summary, entry.changes, entry.symptom)
    assert patch["without"].lower() == entry.without.lower() and patch["concerns"] == entry.concerns
    assert ["".join(piece for piece, _ in pieces) for pieces in patch["links"]] == list(entry.references)
    assert ["".join(piece for piece, _ in pieces) for pieces in patch["met"]] == list(entry.met_by)
    texts = proof_texts(entry)
    assert [proof["label"] for proof in patch["proofs"]] == [text.label for text in texts]
    assert [proof["defect"] for proof in patch["proofs"]] == [t.keywords.get("defect", "silent") for t in texts]
    for (note, cores, tes), rule in zip(patch["pairs"], entry.pairs, strict=True):
        holding = {(core, te) for core in CORES for te in TES if rule.holds({CORE: Version(core), TE: Version(te)})}
        spans = [releases[first : first + number] for releases, (first, number) in ((CORES, cores), (TES, tes))]
        assert note == rule.note and holding == {(core, te) for core in spans[0] for te in spans[1]}


def test_what_a_pair_loses_is_what_shim_plan_says():
    for place, core in enumerate(CORES):
        for bit, te in enumerate(TES):
            found = [
                (lost, patch)
                for lost, patch, spans in DATA["lost"]
                if any(first <= place < first + number and bits >> bit & 1 for first, number, bits in spans)
            ]
            said = {(feature.lost, feature.patch) for feature in losses_of(Version(core), Version(te))}
            assert len(found) == len(said) and set(found) == said, (core, te)


def test_each_word_can_be_ticked_once():
    """But for those that the choice of Transformer Engine answers."""
    ticked = [word for _, words in DATA["words"] for word, _ in words]
    assert sorted([*ticked, *ANSWERED]) == sorted(WORDS) and [group for group, _ in DATA["words"]] == list(GROUPS)
    assert {word for words in PRESETS.values() for word in words.split()} <= set(ticked)


def test_a_word_that_no_group_has_can_be_ticked(monkeypatch):
    monkeypatch.setitem(WORDS, "new-word", "something new")
    assert explore_data(MATRIX, PROVED)["words"][-1][1][-1] == ["new-word", "something new"]


def test_the_page_has_its_data_and_asks_for_nothing_from_elsewhere():
    text = explore_page(MATRIX, PROVED)
    page = Page(text)
    assert json.loads(page.texts["data"]) == json.loads(json.dumps(DATA))
    assert {tag for tag, attributes in page.elements if "src" in attributes or tag in ("link", "img")} == set()
    assert not [part for part in ("@import", "url(", "fetch(", "XMLHttpRequest") if part in text]
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    digests = [
        base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode() for name in ("script", "style")
    ]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert all(f"'sha256-{digest}'" in policy for digest in digests)
    assert len(text.encode()) < 400_000


def test_no_text_is_read_as_html():
    script = (PARTS / "page.js").read_text("utf-8")
    readers = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval",
        "Function(",
        "DOMParser",
        ".srcdoc",
    )
    assert [name for name in readers if name in script] == []
    id, entry = next(iter(MATRIX.patches.items()))
    hostile = "</script><script>alert(1)</script>"
    matrix = replace(MATRIX, patches={**MATRIX.patches, id: replace(entry, summary=hostile)})
    page = Page(explore_page(matrix, PROVED))
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert json.loads(page.texts["data"])["patches"][0]["summary"] == hostile


def test_segments_are_the_text_and_its_links():
    place = "https://github.com/NVIDIA/Megatron-LM/issues/"
    text = "Megatron-LM issues 6760 and 676 (two; open), a fork"
    assert list(segments(text)) == [
        ("Megatron-LM issues ", ""), ("6760", f"{place}6760"), (" and ", ""), ("676", f"{place}676"),
        (" (two; open), a fork", ""),
    ]  # fmt: skip
    assert linked(text) == f"Megatron-LM issues [6760]({place}6760) and [676]({place}676) (two; open), a fork"
    assert list(segments("a fork")) == [("a fork", "")]


# ---- what the tests of the page in a browser compare it with ----


def test_a_defect_hits_whom_it_concerns():
    core = "0.16.1"
    found = hits(MATRIX, PROVED, core, PROVED[core][TE], {"mtp", "packed"})
    label = "mtp-packed-sequences/a-padded-row-trains-like-its-sequences-alone"
    said = PROVED[core]["proofs"][label]
    assert found["silent", "mtp-packed-sequences"] == {label: (said["stock"], said["with_shim"], None)}
    assert not {id for _, id in found} & {"mtp-recompute", "mtp-loss-cp", "te-permutation", "label-smoothing"}
    everything = hits(MATRIX, PROVED, core, PROVED[core][TE])
    assert {"mtp-recompute", "mtp-loss-cp", "label-smoothing"} <= {id for _, id in everything}
    assert found.items() <= everything.items()


def test_without_transformer_engine_its_defects_hit_nobody():
    found = {id for _, id in hits(MATRIX, PROVED, "0.16.1", None)}
    assert {"moe-without-te", "mla-without-te"} <= found
    assert not {id for id in found if MATRIX.patches[id].distribution == TE or id == "te-moved-symbols"}


def test_numbers_of_another_pair_are_told_as_such():
    """Transformer Engine 2.7 gets te-permutation, and no record ran beside it."""
    found = hits(MATRIX, PROVED, "0.18.2", "2.7.0", {"moe"})["crash", "te-permutation"]
    ((_, _, where),) = found.values()
    assert where[1] == PROVED[where[0]][TE] == "2.9.0"
