"""Results as one HTML page: a table, and for each proof its picture, numbers and reproduction."""

from __future__ import annotations

from collections.abc import Sequence

from shim._printing.markdown import escaped_html
from shim._printing.masks import masked
from shim._proving.pictures import PALETTE, both_schemes, picture
from shim._proving.report import Heading
from shim._proving.results import Result, summary

__all__ = ["as_html"]

_STYLE = """
:root { color-scheme: light dark; }
body { font-family: sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 0.25rem 0.8rem 0.25rem 0; vertical-align: top; }
section { border-top: 1px solid var(--faint); margin-top: 1.5rem; }
pre { white-space: pre-wrap; }
a { color: inherit; }
.verdict { border-radius: 0.3rem; padding: 0 0.4rem; color: #fff; white-space: nowrap; }
"""


def as_html(heading: Heading, results: Sequence[Result], overrides: Sequence[str] = ()) -> str:
    """The page; it needs nothing from elsewhere, and follows the reader's light or dark setting."""
    style = both_schemes(":root") + _STYLE
    rows = "".join(
        f'<tr><td><a href="#{_e(r.label)}">{_e(r.label)}</a></td>'
        f"<td>{_e(r.stock.text if r.stock else '')}</td><td>{_e(r.patched.text if r.patched else '')}</td>"
        f"<td>{_badge(r)}</td></tr>"
        for r in results
    )
    said = "".join(f"<li>{_e(line)}</li>" for line in overrides)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>shim prove</title>'
        f"<style>{style}</style></head><body>"
        f"<h1>shim prove</h1><p>{_e(str(heading))}</p><p><strong>{_e(summary(results))}</strong></p>"
        f"<table><tr><th>defect</th><th>stock</th><th>with shim</th><th></th></tr>{rows}</table>"
        + (f"<ul>{said}</ul>" if said else "")
        + "".join(_section(result) for result in results if result.stock is not None)
        + "</body></html>\n"
    )


def _section(result: Result) -> str:
    audit = f"<p>shim audit: {_e(result.audit)}</p>" if result.audit else ""
    reason = f"<p>{_e(result.reason)}</p>" if result.reason else ""
    source = f"<details><summary>the proof</summary><pre>{_e(result.source)}</pre></details>" if result.source else ""
    drawn = picture(result) if result.stock is not None and result.stock.state != "cannot run" else ""
    return (
        f'<section id="{_e(result.label)}"><h2>{_e(result.label)} {_badge(result)}</h2>{drawn}{reason}{audit}'
        f"<pre>{_e(result.reproduction)}</pre>{source}</section>"
    )


def _badge(result: Result) -> str:
    colour = PALETTE.get(result.verdict, PALETTE["not fixed"])
    return f'<span class="verdict" style="background: {colour}">{_e(result.verdict)}</span>'


def _e(text: str) -> str:
    return escaped_html(masked(text))
