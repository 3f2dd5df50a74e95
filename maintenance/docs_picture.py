"""The picture of all defects as SVG: releases across, defects down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shim._printing.markdown import escaped_html
from shim._printing.masks import masked
from shim._proving.pictures import PALETTE, both_schemes

__all__ = ["table"]

CELL, GAP, HEAD = 22, 2, 64
LETTER = 6.6  # the width of one, on average, at the size of the labels


def table(releases: Sequence[str], rows: Mapping[str, Sequence[str]], title: str) -> str:
    """A cell for each release and defect, light or dark by the reader's setting.

    rows: label -> the verdict on each release, "" if there is none.
    """
    left = 16 + round(LETTER * max(map(len, rows), default=0))
    width = max(left + len(releases) * (CELL + GAP) + 8, 640)
    height = HEAD + len(rows) * (CELL + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{_escaped(title)}</title>'
        f'<style>{both_schemes("svg")}</style><rect width="{width}" height="{height}" fill="var(--paper)"/>'
    ]
    for column, release in enumerate(releases):
        x = left + column * (CELL + GAP) + CELL / 2 + 4
        parts.append(
            f'<text transform="translate({x:.0f} {HEAD - 8}) rotate(-60)" fill="var(--ink)">{_escaped(release)}</text>'
        )
    for number, (label, verdicts) in enumerate(rows.items()):
        y = HEAD + number * (CELL + GAP)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end" fill="var(--ink)">{_escaped(label)}</text>')
        for column, verdict in enumerate(verdicts):
            x = left + column * (CELL + GAP)
            fill = PALETTE.get(verdict, PALETTE["not fixed"])
            outline = ' stroke="var(--faint)" stroke-width="0.5"' if fill == "none" else ""
            said = _escaped(f"{label}, {releases[column]}: {verdict or 'not there'}")
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{fill}"{outline}>'
                f"<title>{said}</title></rect>"
            )
    legend = (("fixed", "stock wrong, fixed"), ("upstream", "upstream right"), ("cannot run", "cannot run here"))
    x = 16
    for verdict, text in (*legend, ("not fixed", "not fixed")):
        y = height - 22
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{PALETTE[verdict]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}" fill="var(--ink)">{text}</text>')
        x += 32 + 7 * len(text)
    return "".join(parts) + "</svg>\n"


def _escaped(text: str) -> str:
    return escaped_html(masked(text))
