"""Results as one HTML page: a table, and for each proof its picture, numbers and reproduction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shim._printing.markdown import escaped_html
from shim._printing.masks import masked
from shim._proving.pictures import PALETTE, both_schemes, picture
from shim._proving.report import Heading
from shim._proving.results import Outcome, Result, summary

__all__ = ["as_html"]

_STYLE = """
:root { color-scheme: light dark; --line: rgb(128 128 128 / 0.35); }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
body { max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0.3rem; }
h2 { font-size: 1.15rem; margin: 1.5rem 0 0.6rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: 0.4rem 1rem 0.4rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
td:first-child { width: 34%; } td:last-child { width: 18%; padding-right: 0; }
small { display: block; color: var(--faint); }
section { border-top: 1px solid var(--line); margin-top: 1.5rem; }
section p, section pre, section ul { max-width: 46rem; }
pre { white-space: pre-wrap; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.88em; }
svg { max-width: 100%; height: auto; display: block; margin: 0.4rem 0; }
a { color: inherit; }
summary { cursor: pointer; }
.number, .verdict { white-space: nowrap; }
.verdict { border-radius: 0.3rem; padding: 0.05rem 0.45rem; color: #fff; font-size: 0.9rem; font-weight: 400; }
@media (max-width: 44rem) {
  body { margin-top: 1rem; }
  thead { display: none; }
  table, tbody, tr, td, td:first-child, td:last-child { display: block; width: auto; }
  tr { border-bottom: 1px solid var(--line); padding: 0.6rem 0; }
  td { border: 0; padding: 0.1rem 0; }
  td:empty { display: none; }
  td[data-name]::before { content: attr(data-name) ": "; color: var(--faint); }
}
"""
_CODE = re.compile("`([^`]+)`")
# A number with an exponent has a hyphen at which a line would break.
_NUMBER = re.compile(r"\d(?:\.\d+)?e[+-]\d+")


def as_html(heading: Heading, results: Sequence[Result], overrides: Sequence[str] = ()) -> str:
    """The page; it needs nothing from elsewhere, and follows the reader's light or dark setting."""
    style = both_schemes(":root") + _STYLE
    rows = "".join(
        f"<tr><td>{_link(r)}</td>{_side('stock', r.stock)}{_side('with shim', r.patched)}<td>{_verdict(r)}</td></tr>"
        for r in results
    )
    said = "".join(f"<li>{_e(line)}</li>" for line in overrides)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>shim prove</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>"
        f"<h1>shim prove</h1><p>{_e(str(heading))}</p><p><strong>{_e(summary(results))}</strong></p>"
        "<table><thead><tr><th>defect</th><th>stock</th><th>with shim</th><th>verdict</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        + (f"<ul>{said}</ul>" if said else "")
        + "".join(_section(result) for result in results if result.stock is not None)
        + "</body></html>\n"
    )


def _link(result: Result) -> str:
    """The label, which leads to the section of a proof that ran."""
    label = _e(result.label)
    return label if result.stock is None else f'<a href="#{label}">{label}</a>'


def _side(name: str, outcome: Outcome | None) -> str:
    text = "" if outcome is None or outcome.state == "cannot run" else _numbers(_e(outcome.text))
    return f'<td data-name="{name}">{text}</td>' if text else "<td></td>"


def _verdict(result: Result) -> str:
    """The verdict, and why, unless it is the one that everybody hopes for."""
    why = "" if result.verdict == "fixed" else result.reason
    return _badge(result) + (f" <small>{_numbers(_e(why))}</small>" if why else "")


def _section(result: Result) -> str:
    audit = f"<p>shim audit: {_e(result.audit)}</p>" if result.audit else ""
    reason = f"<p>{_numbers(_e(result.reason))}</p>" if result.reason else ""
    source = f"<details><summary>the proof</summary><pre>{_e(result.source)}</pre></details>" if result.source else ""
    drawn = picture(result) if result.stock is not None and result.stock.state != "cannot run" else ""
    return (
        f'<section id="{_e(result.label)}"><h2>{_e(result.label)} {_badge(result)}</h2>{drawn}{reason}{audit}'
        f"{''.join(_prose(result.reproduction))}{source}</section>"
    )


def _prose(text: str) -> Iterator[str]:
    """Paragraphs of a docstring, which may break anywhere. Lines that begin with a space stay as they are."""
    for block in re.split(r"\n\s*\n", text.strip()):
        if re.search(r"^\s", block, re.M):
            yield f"<pre>{_e(block)}</pre>"
        else:
            text = _numbers(_e(" ".join(block.split())))
            yield "<p>" + _CODE.sub(r"<code>\1</code>", text) + "</p>"


def _badge(result: Result) -> str:
    colour = PALETTE.get(result.verdict, PALETTE["not fixed"])
    return f'<span class="verdict" style="background: {colour}">{_e(result.verdict)}</span>'


def _numbers(text: str) -> str:
    """Text that is HTML already, whose numbers stay on one line."""
    return _NUMBER.sub(r'<span class="number">\g<0></span>', text)


def _e(text: str) -> str:
    return escaped_html(masked(text))
