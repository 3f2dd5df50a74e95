"""docs/explore.html in a real Chromium: what it shows for a choice, its address, keys, sizes and colour schemes."""

import json
from dataclasses import replace

import pytest
from chromium import CONTRASTS, address_of
from explored import CORE, TE, hits
from packaging.version import Version

from shim._matrix.load import load_matrix
from shim._te.features import losses_of
from shim.maintenance.docs_explore import explore_page
from shim.maintenance.proof_results import read_proved

MATRIX = load_matrix()
PROVED = read_proved(MATRIX)
NEWEST = MATRIX.supported[CORE][-1]
MOST = ["mtp", "moe", "mla", "packed", "padding-mask", "recompute", "tp", "sp", "cp", "pp", "ep", "checkpoint"]
# In the page's words: kind, patch, and for each proof its label, the two sides, and the pair that it names.
SHOWN = """
[...document.querySelectorAll(".card")].map((card) => [
  card.closest(".kind").dataset.kind, card.dataset.patch,
  [...card.querySelectorAll("[data-proof]")].map((proof) => {
    const where = (proof.matches(".proof") ? proof : card).querySelector(".where");
    const side = (name) => (proof.querySelector(`.${name} dd`) || proof.querySelector(`.${name}`)).textContent;
    return [proof.dataset.proof, side("stock"), side("with"), where && where.textContent];
  }),
])
"""
TOTALS = (
    "[...document.querySelectorAll('.total')].map((part) => [part.dataset.total, +part.querySelector('b').textContent])"
)
OPEN_ALL = 'for (const part of document.querySelectorAll("details")) part.open = true'
OUTLINE = """
[getComputedStyle(document.activeElement)].map((style) => [style.outlineStyle, parseFloat(style.outlineWidth)])[0]
"""
FOCUSED = (
    "(({ id, value, className, textContent }) => [id, value || '', className, textContent])(document.activeElement)"
)


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    file = tmp_path_factory.mktemp("docs") / "explore.html"
    file.write_text(explore_page(MATRIX, PROVED), "utf-8")
    return file


@pytest.fixture
def page(browser, explorer):
    """Opens the page with a choice; afterwards nothing may have gone wrong, and nothing have been loaded."""

    def opened(hash="", file=explorer, **how):
        browser.open(address_of(file, hash), **how)
        return browser

    yield opened
    assert browser.problems() == []
    assert [url for url in browser.requests() if not url.startswith("file://")] == []
    assert len(browser.requests()) == 1


def shown(browser):
    found = {}
    for kind, patch, proofs in browser.run(SHOWN):
        assert (kind, patch) not in found
        found[kind, patch] = {label: (stock, shim, where) for label, stock, shim, where in proofs}
    return found


def expected(core, te, words):
    def told(stock, shim, where):
        return stock, shim, where and f"Measured on {CORE} {where[0]} with Transformer Engine {where[1]}."

    found = hits(MATRIX, PROVED, core, te, words)
    return {place: {label: told(*said) for label, said in proofs.items()} for place, proofs in found.items()}


def hash_of(core, te, words):
    return f"#core={core}&te={te or 'none'}" + ("" if words is None else f"&for={','.join(words)}")


CHOICES = [
    ("0.16.1", "2.12.0", ["mtp", "packed"]),
    ("0.16.1", "2.12.0", None),
    ("0.12.0", "2.20.2", None),
    ("0.19.2", "2.7.0", MOST),
    ("0.18.2", None, MOST),
    ("0.17.1", "2.14.1", []),
    ("0.13.1", "2.1.0", ["lora", "recompute", "fp8"]),
    *((core, PROVED[core][TE], None) for core in MATRIX.supported[CORE]),
    *(("0.17.0", te, None) for te in MATRIX.supported[TE]),
]


@pytest.mark.parametrize("choice", CHOICES, ids=[hash_of(*choice) for choice in CHOICES])
def test_the_page_shows_what_the_matrix_and_the_record_say(page, choice):
    browser = page(hash_of(*choice))
    found = shown(browser)
    assert found == expected(*choice)
    totals = dict(browser.run(TOTALS))
    by_kind = {kind: sum(len(proofs) for (k, _), proofs in found.items() if k == kind) for kind in totals}
    assert totals == by_kind and list(totals) == ["silent", "crash", "hang", "memory", "missing"]


def test_what_the_pair_loses_is_told(page):
    """Of this pair, with the patch that restores it; nothing without Transformer Engine."""
    said = "[...document.querySelectorAll('#lost li')].map((line) => line.textContent)"
    found = page(hash_of("0.18.2", "2.5.0", None)).run(said)
    lost = {feature.lost: feature.patch for feature in losses_of(Version("0.18.2"), Version("2.5.0"))}
    assert sorted(found) == sorted(f"{what} (restored by {patch})" if patch else what for what, patch in lost.items())
    assert len(found) > 5 and any("te-moved-symbols" in line for line in found)
    assert page(hash_of("0.18.2", None, None)).run(said) == []


def test_without_a_choice_it_shows_the_newest_release_beside_one_of_its_time(page):
    assert shown(page()) == expected(NEWEST, PROVED[NEWEST][TE], None)


def test_the_commands_name_what_is_shown(page):
    browser = page(hash_of("0.16.1", "2.12.0", ["mtp", "packed"]))
    here = {patch for _, patch in shown(browser)}
    ids = [id for id in MATRIX.patches if id in here]
    said = browser.run("[...document.querySelectorAll('.command pre')].map((text) => text.textContent)")
    assert f"shim prove {' '.join(ids)}" in said
    assert f"MEGATRON_SHIM_ONLY={','.join(ids)} shim run -- python train.py" in said
    assert {f"shim prove {id}" for id in ids} | {f"MEGATRON_SHIM_ONLY={id}" for id in ids} <= set(said)
    links = browser.run("[...document.querySelectorAll('.card a')].map((link) => link.href)")
    assert "https://github.com/NVIDIA/Megatron-LM/pull/6205" in links


def test_the_address_keeps_the_choice(page):
    """Of the two releases and of what is ticked; and a link with a choice sets all of them."""
    browser = page()
    browser.run("""
      for (const [id, text] of [["core", "0.15.3"], ["te", "2.5.0"]]) {
        const select = document.getElementById(id);
        select.value = [...select.options].find((option) => option.textContent.startsWith(text)).value;
        select.dispatchEvent(new Event("change"));
      }
      for (const word of ["packed", "mtp"]) document.querySelector(`input[value=${word}]`).click();
    """)
    kept = browser.run("location.hash")
    assert kept == hash_of("0.15.3", "2.5.0", ["mtp", "packed"])
    before = shown(browser)
    assert before == expected("0.15.3", "2.5.0", ["mtp", "packed"])
    browser = page(kept)
    assert shown(browser) == before
    assert browser.run("[...document.querySelectorAll('input:checked')].map((box) => box.value)") == ["mtp", "packed"]
    # The next link in the same tab loads nothing, and is followed all the same.
    browser.run(f"location.hash = {json.dumps(hash_of('0.16.1', '2.12.0', ['lora', 'recompute']))}")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert shown(browser) == expected("0.16.1", "2.12.0", ["lora", "recompute"])


def test_the_release_of_its_time_follows_until_another_is_chosen(page):
    browser = page(hash_of("0.16.1", "2.12.0", []))
    change = (
        "document.getElementById('core').value = {}; document.getElementById('core').dispatchEvent(new Event('change'))"
    )
    browser.run(change.format(MATRIX.supported[CORE].index("0.19.2")))
    assert browser.run("location.hash") == hash_of("0.19.2", "2.20.2", [])
    browser = page(hash_of("0.16.1", "2.13.0", []))
    browser.run(change.format(MATRIX.supported[CORE].index("0.19.2")))
    assert browser.run("location.hash") == hash_of("0.19.2", "2.13.0", [])


def test_what_an_address_asks_for_in_vain_is_told(page):
    browser = page("#core=0.99.0&te=2.12.0&for=mtp,spoons")
    assert browser.run("document.getElementById('unknown').textContent").endswith("core 0.99.0, spoons.")
    assert shown(browser) == expected(NEWEST, "2.12.0", ["mtp"])
    assert page("#for=mtp").run("document.getElementById('unknown').hidden")


def test_the_keyboard_reaches_all_of_it(page):
    """In the order of the page, with a visible focus; a box is ticked and a defect opened by a key."""
    browser = page(hash_of("0.16.1", "2.12.0", ["packed", "moe"]))
    places = []
    for _ in range(80):
        browser.press("Tab", 9)
        places.append(browser.run(FOCUSED))
        if places[-1][1] == "mtp":
            browser.press(" ", 32, " ")
        style, width = browser.run(OUTLINE)
        assert style != "none" and width >= 2, places[-1]
        if "card" in browser.run("document.activeElement.parentElement.className"):
            break
    names = [id or value or name for id, value, name, _ in places]
    assert names[:3] == ["skip", "core", "te"] and "mtp" in names and "total silent" in names
    assert browser.run("location.hash") == hash_of("0.16.1", "2.12.0", ["mtp", "moe", "packed"])
    browser.press("Enter", 13, "\r")
    assert browser.run("document.querySelector('.card').open")
    browser.press("Tab", 9)
    assert browser.run("document.activeElement.matches('.card a, .card pre')")


def test_a_total_leads_to_its_defects(page):
    browser = page(hash_of("0.16.1", "2.12.0", None))
    browser.run("document.querySelector('.total.crash').click()")
    assert browser.run("document.activeElement.id") == "kind-crash"


@pytest.mark.parametrize("width", (360, 768, 1280))
def test_nothing_is_wider_than_the_window(page, width):
    browser = page(hash_of("0.16.1", "2.20.2", None), width=width)
    browser.run(OPEN_ALL)
    assert browser.run("document.documentElement.scrollWidth") <= width
    if width == 360:
        small = browser.run("""[...document.querySelectorAll("select, button, .word, .card > summary")]
            .filter((part) => part.getClientRects().length && part.getBoundingClientRect().height < 30)
            .map((part) => part.outerHTML.slice(0, 80))""")
        assert small == []


@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
def test_all_text_has_contrast(page, dark):
    browser = page(hash_of("0.16.1", "2.20.2", MOST), dark=dark)
    browser.run(OPEN_ALL)
    found = browser.run(CONTRASTS)
    assert len(found) > 300 and [text for text, contrast, least in found if contrast < least] == []


def test_the_schemes_differ(page):
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page(dark=False).run(colour) == "rgb(255, 255, 255)"
    assert page(dark=True).run(colour) == "rgb(13, 17, 23)"


def test_text_that_looks_like_html_is_shown_as_it_is(page, tmp_path):
    id, hostile = "label-smoothing", "<img src=x onerror=alert(1)>"
    entry = replace(MATRIX.patches[id], summary=hostile, references=(hostile,))
    file = tmp_path / "explore.html"
    file.write_text(explore_page(replace(MATRIX, patches={**MATRIX.patches, id: entry}), PROVED), "utf-8")
    browser = page(hash_of("0.16.1", "2.12.0", None), file=file)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run(f"document.querySelector('[data-patch={id}]').textContent").count(hostile) == 2
