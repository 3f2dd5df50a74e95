"""Verdicts of proofs, and what they look like as text, Markdown, data, page and picture; without torch."""

import json
import math
import re
import xml.dom.minidom
from dataclasses import replace

import pytest

from shim._matrix.model import SYMPTOMS
from shim._proving.page import as_html
from shim._proving.pictures import DARK, LIGHT, PALETTE, picture
from shim._proving.report import Heading, as_data, as_markdown, as_text
from shim._proving.results import FAILURES, Outcome, Result, generic_verdict, outcome_of, summary, verdict_of
from shim._proving.worker import SideTask, Work
from shim.maintenance.docs_picture import TONES, Row, bars, table

RIGHT, WRONG = Outcome("right", "off by 1.0e-07", 0.5, 1e-7), Outcome("wrong", "off by 1.0e-02", 0.5, 1e-2)
RAISED, HUNG = Outcome("wrong", "TypeError: y", 0.5, math.inf), Outcome("wrong", "no end within 120 s")
BROKEN, IMPOSSIBLE = Outcome("broken", "KeyError: 'x'"), Outcome("cannot run", "no FP8 on this GPU")


@pytest.mark.parametrize(
    "action, stock, patched, verdict",
    [
        ("apply", WRONG, RIGHT, "fixed"),
        ("apply", WRONG, WRONG, "not fixed"),
        ("apply", WRONG, BROKEN, "not fixed"),
        ("apply", RAISED, RAISED, "not fixed"),
        ("apply", RAISED, WRONG, "not fixed"),
        ("apply", RAISED, BROKEN, "broken"),  # another error, behind the one that stock raises
        ("apply", HUNG, BROKEN, "broken"),
        ("apply", RIGHT, RIGHT, "not reproduced"),
        ("apply", RIGHT, WRONG, "not reproduced"),
        ("apply", BROKEN, RIGHT, "broken"),
        ("apply", IMPOSSIBLE, IMPOSSIBLE, "cannot run"),
        ("apply", WRONG, IMPOSSIBLE, "cannot run"),
        ("upstream", RIGHT, None, "upstream"),
        ("upstream", WRONG, None, "not fixed"),
        ("upstream", BROKEN, None, "broken"),
        ("drifted", WRONG, None, "not fixed"),
        ("drifted", RIGHT, None, "right"),
    ],
)
def test_the_verdict_follows_from_plan_and_sides(action, stock, patched, verdict):
    found, reason = verdict_of(action, stock, patched)
    assert found == verdict and (reason or verdict == "fixed")


@pytest.mark.parametrize(
    "stock, patched, verdict",
    [
        (WRONG, RIGHT, "fixed"),
        (RIGHT, RIGHT, "right"),
        (WRONG, WRONG, "not fixed"),
        (RIGHT, WRONG, "made worse"),
        (RIGHT, BROKEN, "broken"),
        (IMPOSSIBLE, RIGHT, "cannot run"),
    ],
)
def test_a_model_of_a_user_may_be_right_without_shim(stock, patched, verdict):
    assert generic_verdict(stock, patched)[0] == verdict


@pytest.mark.parametrize(
    "state, defect, crashes, outcome",
    [
        ("hung", "silent", "", "broken"),
        ("hung", "hang", "", "wrong"),
        ("died", "crash", "TypeError", "broken"),
        ("died", "crash", "signal SIGSEGV", "wrong"),
        ("right", "hang", "", "right"),
    ],
)
def test_a_hang_or_a_death_is_wrong_only_where_it_is_the_defect(state, defect, crashes, outcome):
    assert outcome_of({"state": state, "text": "x"}, defect, crashes).state == outcome


def result(label="rope-thd", verdict="fixed", stock=WRONG, patched=RIGHT, **more):
    how = {"kind": "correctness", "defect": "silent", "device": "cpu", "reason": "a reason", "bound": 1e-6}
    text = "Something <is> wrong.\n\nCall it."
    return Result(
        label, "a-proof", label, verdict=verdict, stock=stock, patched=patched, reproduction=text, **{**how, **more}
    )


RESULTS = [
    result(),
    result("mtp|recompute", "not fixed", WRONG, BROKEN, source="def f(): ..."),
    result("te-fp8-state", "cannot run", None, None),
    result("crash", "fixed", Outcome("wrong", "TypeError: x | y", 0.1, math.inf), RIGHT),
    result("audited", "upstream", RIGHT, None, audit="drifted: unknown body"),
]
HEADING = Heading({"megatron-core": "0.16.1", "torch": "2.13.0"}, "CPU", None)


def test_text_has_a_line_for_each_proof_and_a_summary():
    lines = as_text(HEADING, RESULTS).splitlines()
    assert lines[0] == "megatron-core 0.16.1, torch 2.13.0, CPU (2 gloo ranks where needed)"
    assert lines[-1] == "2 fixed, 1 upstream already right, 1 cannot run here, 1 not fixed"
    first = next(line for line in lines if line.startswith("rope-thd"))
    assert (
        first.endswith("fixed       1.0 s")
        and "stock: off by 1.0e-02 " in first
        and "with shim: off by 1.0e-07 " in first
    )
    assert "    shim audit: drifted: unknown body" in lines and "    a reason" in lines
    assert "Cannot run here, because a reason (te-fp8-state)." in lines


def test_text_says_why_a_proof_has_failed():
    """By the numbers of both sides and the bound. A side without a result says where it has raised, at its end."""
    details = "Traceback:\n  of old\n" + "".join(f"  line {number}\n" for number in range(5))
    broken = replace(BROKEN, details=details)
    for found, said in (
        (
            result("a", "not fixed", WRONG, WRONG),
            ["a reason", "measured: stock 0.01, with shim 0.01; right up to 1e-06"],
        ),
        (result("b", "broken", broken, None), ["a reason", *(f"stock:   line {number}" for number in range(5))]),
    ):
        lines = as_text(HEADING, [found]).splitlines()
        start = lines.index("    a reason")
        assert [line.strip() for line in lines[start : lines.index("", start)]] == said
    assert "measured:" not in as_text(HEADING, [result()])


def test_on_a_narrow_terminal_each_proof_takes_three_lines():
    lines = as_text(HEADING, RESULTS, width=80).splitlines()
    place = lines.index("rope-thd: fixed, 1.0 s")
    assert lines[place + 1 : place + 3] == ["    stock: off by 1.0e-02", "    with shim: off by 1.0e-07"]
    assert as_text(HEADING, RESULTS, width=200) == as_text(HEADING, RESULTS)


def test_a_summary_counts_what_is_fixed_and_what_is_not_always():
    assert summary([]) == "0 fixed, 0 not fixed"


def test_markdown_escapes_what_upstream_says():
    text = as_markdown(HEADING, RESULTS)
    assert "| crash | TypeError: x \\| y | off by 1.0e-07 | fixed |" in text
    assert "<summary>rope-thd: Something &lt;is&gt; wrong.</summary>" in text


def test_data_is_strict_json():
    data = json.loads(json.dumps(as_data(HEADING, RESULTS), allow_nan=False))
    assert data["proofs"]["crash"]["stock"]["value"] is None
    assert data["failed"] == ["mtp|recompute"] and data["where"]["device"] == "CPU"
    assert {result.label for result in RESULTS if result.verdict in FAILURES} == set(data["failed"])


def test_the_page_is_whole_and_escapes_what_upstream_says():
    page = as_html(HEADING, RESULTS, ["an <override>"])
    assert page.count("<section") == 4 and "&lt;override&gt;" in page and "Something &lt;is&gt; wrong." in page
    assert "prefers-color-scheme: dark" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_page_says_why_in_the_cell_and_leads_only_to_sections():
    page = as_html(HEADING, RESULTS)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    cells = dict(re.findall(r"<tr><td>(?:<a [^>]*>)?([^<]*).*?<td>(<span class=\"verdict\".*?)</td></tr>", page))
    assert "a reason" in cells["te-fp8-state"] and "a reason" in cells["mtp|recompute"]
    assert "a reason" not in cells["rope-thd"]
    leading, there = re.findall('href="#([^"]*)"', page), re.findall('<section id="([^"]*)"', page)
    assert leading == there and "te-fp8-state" not in there


def test_a_number_stays_on_one_line_and_a_paragraph_does_not():
    stock = Outcome("wrong", "off by 7.6e-08 and 1e+3", 0.5, 1.0)
    text = "Wrong.\n\nCall `f(x)` in\nsteps: 1e-3.\n\n    f(1)\n    f(2)"
    page = as_html(HEADING, [replace(result(stock=stock), reproduction=text)])
    number = '<span class="number">{}</span>'.format
    assert f'<td data-name="stock">off by {number("7.6e-08")} and {number("1e+3")}</td>' in page
    assert (
        f"<p>Wrong.</p><p>Call <code>f(x)</code> in steps: {number('1e-3')}.</p><pre>    f(1)\n    f(2)</pre>" in page
    )


def test_the_axes_have_names_and_the_bound_crosses_bars_only():
    """The bound stands between the baselines of text, which would be hard to read below it."""
    curves = Outcome("wrong", "off", 1, 0.1, CURVES)
    drawn = picture(result(stock=curves, patched=curves, curve="gradient norm"))
    assert ">gradient norm</text>" in drawn and ">step</text>" in drawn and ">3</text>" in drawn
    drawn = picture(result())
    assert ">right up to 1e-06</text>" in drawn and ">logarithmic scale</text>" in drawn
    baselines = [int(y) for y in re.findall(r'<text x="\d+" y="(\d+)"', drawn)]
    marks = re.search(r'<path d="((?:M\d+ \d+v\d+)+)"', drawn)[1]
    spans = [(int(y), int(y) + int(high)) for y, high in re.findall(r"M\d+ (\d+)v(\d+)", marks)]
    assert len(spans) == 2
    assert not [(y, span) for y in baselines for span in spans if span[0] < y + 4 and y - 10 < span[1]]


def test_a_badge_has_contrast():
    """White on each colour, by WCAG 2."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722)))

    assert {
        verdict: 1.05 / (luminance(colour) + 0.05) >= 4.5 for verdict, colour in PALETTE.items() if verdict
    } == dict.fromkeys(filter(None, PALETTE), True)


CURVES = {"truth": [3.0, 2.0, 1.0], "measured": [3.0, 2.5, math.nan]}


@pytest.mark.parametrize(
    "found",
    [
        *(found for found in RESULTS if found.stock is not None),
        result(bound=0.0, stock=Outcome("wrong", "3 differ", 1, 3), patched=Outcome("right", "bit-equal", 1, 0)),
        result(stock=Outcome("wrong", "off", 1, 0.1, CURVES), patched=Outcome("right", "off", 1, 0.0, CURVES)),
        result(stock=Outcome("wrong", "off", 1, math.nan, {"measured": [math.nan]})),
    ],
)
def test_a_picture_is_well_formed(found):
    drawn = picture(found)
    xml.dom.minidom.parseString(drawn)
    assert ("polyline" in drawn) == bool(found.stock.curves.get("truth"))
    assert "nan" not in drawn and "inf" not in drawn.replace("infinity", "")


def test_the_table_names_each_cell_in_light_and_dark():
    rows = [Row("rope-thd", ("rope-thd/a", "rope-thd/b"), ("fixed", "upstream")), Row("p", ("p",), ("", "not fixed"))]
    drawn = table(["0.18.2", "0.19.2"], rows, "Proofs")
    xml.dom.minidom.parseString(drawn)
    assert LIGHT["ink"] in drawn and DARK["ink"] in drawn
    assert "rope-thd/a, rope-thd/b, 0.19.2: right on stock" in drawn and ">2 proofs</text>" in drawn
    # Each state that there is is explained, above all rows, and no other.
    legend = drawn[: drawn.index(">0.18</text>")]
    said = (
        "wrong on stock, right with shim",
        "right on stock",
        "a defect of other releases",
        "wrong with shim as well",
    )
    assert all(f">{text}</text>" in legend for text in said) and "not run" not in drawn


def test_neighbours_with_one_verdict_are_one_shape_cut_into_cells():
    releases = ["0.17.0", "0.17.1", "0.18.0", "0.18.1"]
    drawn = table(releases, [Row("p", ("p",), ("fixed", "fixed", "fixed", "upstream"))], "Proofs")
    assert "p, 0.17.0 to 0.18.0: wrong on stock" in drawn and "p, 0.18.1: right on stock" in drawn
    assert drawn.count("<title>p, ") == 2
    cuts = re.findall(r'<path d="([^"]+)" stroke="var\(--paper\)" stroke-width="(\d+)"', drawn)
    assert [(path.count("M"), int(wide)) for path, wide in cuts] == [(2, 2), (1, 7)]


def test_a_bar_has_a_part_for_each_symptom_and_their_sum():
    counts = {"0.18.2": {"silent": 2, "crash": 3}, "0.19.2": {"silent": 1}}
    drawn = bars(counts, "Defects")
    xml.dom.minidom.parseString(drawn)
    parts = ["0.18.2: 2 silent: wrong numbers", "0.18.2: 3 crash", "0.19.2: 1 silent: wrong numbers"]
    assert re.findall("<title>megatron-core (.*?)</title>", drawn) == parts
    assert ">5</text>" in drawn and ">1</text>" in drawn and ">hang</text>" not in drawn
    assert bars({}, "Defects").endswith("</svg>\n")
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill="var\(--(?:silent|crash)\)"><t', drawn)]
    assert (heights[1] + 1) / (heights[0] + 1) == pytest.approx(1.5, 0.02)
    assert set(TONES) == set(SYMPTOMS)


def test_work_travels_as_json():
    tasks = (SideTask("a stock", "shim.patches.x", "a", None), SideTask("a with shim", "shim.patches.x", "a", ("x",)))
    work = Work(tasks, preload=True, te=True, timeout=3.0)
    assert Work.from_json(work.to_json()) == work
