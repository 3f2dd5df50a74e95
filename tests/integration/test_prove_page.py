"""The page of `shim prove --html` in a real Chromium: wide and narrow, in dark and light."""

import math
from dataclasses import replace

import pytest
from chromium import CONTRASTS, address_of

from shim._proving.page import as_html
from shim._proving.report import Heading
from shim._proving.results import Outcome, Result

CURVES = {"truth": [3.0, 2.0, 1.0], "measured": [3.0, 2.5, 2.1]}
TEXT = "Something is wrong.\n\nTo reproduce: call `megatron.core.tensor_parallel.vocab_parallel_cross_entropy(logits)`."
# Texts of a picture that are not seen whole.
OUTSIDE = """
[...document.querySelectorAll("svg text")].filter((text) => {
  const [own, whole] = [text, text.closest("svg")].map((part) => part.getBoundingClientRect());
  return own.left < whole.left - 1 || own.right > whole.right + 1 || own.top < whole.top - 1
    || own.bottom > whole.bottom + 1;
}).map((text) => text.textContent)
"""
SIDES = {
    "fixed": (
        Outcome("wrong", "losses off by 7.6e-02", 1, 7.6e-2),
        Outcome("right", "losses off by 7.6e-08", 1, 7.6e-8),
    ),
    "not fixed": (
        Outcome("wrong", "off by 1.0e-01", 1, 0.1, CURVES),
        Outcome("wrong", "off by 9.1e-02", 1, 0.09, CURVES),
    ),
    "upstream": (Outcome("right", "bit-equal", 1, 0.0), None),
    "broken": (Outcome("broken", f"AttributeError: {'a_name_without_any_place_to_break' * 4}", 1, math.nan), None),
    "cannot run": (None, None),
}


def result(verdict):
    label = f"a-patch/{'a-long-name-' * 4}{verdict.replace(' ', '-')}"
    reason = "" if verdict == "fixed" else "with shim: off by 9.1e-02"
    blank = Result("a-patch", "a-proof", label, "correctness", "silent", "cpu", verdict, reason, bound=1e-6)
    stock, patched = SIDES[verdict]
    return replace(blank, stock=stock, patched=patched, reproduction=TEXT, source="def f():\n    ...")


RESULTS = list(map(result, SIDES))


@pytest.fixture
def page(browser, tmp_path):
    file = tmp_path / "proofs.html"
    file.write_text(as_html(Heading({"megatron-core": "0.16.1"}, "CPU", None), RESULTS, ["an override"]), "utf-8")

    def opened(**how):
        browser.open(address_of(file), **how)
        return browser

    yield opened
    assert browser.problems() == [] and len(browser.requests()) == 1


@pytest.mark.parametrize("width", (360, 768, 1280))
def test_nothing_is_wider_than_the_window_and_no_number_breaks(page, width):
    browser = page(width=width)
    browser.run('for (const part of document.querySelectorAll("details")) part.open = true')
    assert browser.run("document.documentElement.scrollWidth") <= width
    lines = browser.run(
        "[...document.querySelectorAll('.number, .verdict')].map((part) => part.getClientRects().length)"
    )
    assert len(lines) > 10 and set(lines) == {1}
    # A picture is as wide as its page at most, and its text is seen whole.
    assert browser.run(OUTSIDE) == []


@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
def test_all_text_has_contrast(page, dark):
    found = page(dark=dark).run(CONTRASTS)
    assert len(found) > 40 and [text for text, contrast, least in found if contrast < least] == []
