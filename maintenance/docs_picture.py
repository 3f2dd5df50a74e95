"""The pictures of all defects as SVG: each defect on each release, and the number of defects of each release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from shim._printing.markdown import escaped_html
from shim._printing.masks import masked
from shim._proving.pictures import PALETTE, both_schemes

__all__ = ["TONES", "Row", "bars", "table", "tones"]

# The colour of each symptom in light and in dark, legible as text.
TONES = {
    "silent": ("#cf222e", "#ff8a82"),
    "crash": ("#b34700", "#f0a060"),
    "hang": ("#8250df", "#d2a8ff"),
    "memory": ("#0969da", "#79c0ff"),
    "missing": ("#57606a", "#9aa4af"),
}
LEGEND = {
    "fixed": "wrong on stock, right with shim",
    "upstream": "right on stock",
    "cannot run": "not run: needs a GPU, or a feature that the release lacks",
    "": "a defect of other releases",
    "not fixed": "wrong with shim as well",
}
CELL, ROW, PITCH, SPLIT = 14, 11, 13, 5  # a cell is CELL wide; SPLIT lies between 0.12.3 and 0.13.0
TOP, HEAD, SIDE = 72, 34, 16  # of the legend, of the names of releases, beside all of it
LETTER = 6.1  # the width of one, on average, at the size of the labels
LONGEST = 40  # letters of a label


@dataclass(frozen=True)
class Row:
    """Proofs of one patch that came out alike: their labels, and the verdict on each release, "" if there is none."""

    patch: str
    labels: tuple[str, ...]
    verdicts: tuple[str, ...]


def tones(selector: str) -> str:
    """CSS that gives `selector` the colours of symptoms as variables, by the reader's light or dark setting."""
    light, dark = ("; ".join(f"--{name}: {both[place]}" for name, both in TONES.items()) for place in (0, 1))
    return f"{selector} {{ {light} }} @media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"


def table(releases: Sequence[str], rows: Sequence[Row], title: str) -> str:
    """Releases across, proofs down, light or dark by the reader's setting.

    Neighbours with one verdict are one shape, which lines in the colour of the paper cut into cells.
    """
    names = SIDE + round(LETTER * max((len(row.patch) for row in rows), default=0)) + 12
    left = names + round(LETTER * LONGEST)
    places = list(_places(releases, left, CELL))
    bottom = TOP + HEAD + len(rows) * PITCH
    width = (places[-1] + CELL if places else left) + SIDE
    parts = [_legend(rows, width), _head(releases, places, TOP + HEAD), _head(releases, places, bottom + 30)]
    shapes: list[str] = []
    before = ""
    for number, row in enumerate(rows):
        y = TOP + HEAD + number * PITCH
        if row.patch != before:
            parts.append(f'<path d="M{SIDE} {y - 1}H{width - SIDE}" stroke="var(--faint)" stroke-width="0.3"/>')
            parts.append(_text(SIDE, y + 9, row.patch, "ink"))
        said = _named(row, alone=row.patch != before and sum(other.patch == row.patch for other in rows) == 1)
        parts.append(_text(names, y + 9, said, "faint"))
        shapes.extend(_shapes(row, releases, places, y))
        before = row.patch
    parts += [*shapes, _cuts(places, TOP + HEAD - 1, bottom - 1)]
    return _whole(width, bottom + 40, title, both_schemes("svg"), parts)


def _cuts(places: Sequence[int], top: int, bottom: int) -> str:
    """Between two cells, and wider between two series of releases."""
    widths = [after - place - CELL + 2 for place, after in pairwise(places)]
    return "".join(
        f'<path d="{"".join(f"M{place + CELL - 2 + wide / 2:g} {top}V{bottom}" for place in found)}" '
        f'stroke="var(--paper)" stroke-width="{wide}"/>'
        for wide in sorted(set(widths))
        for found in [[place for place, other in zip(places, widths) if other == wide]]
    )


def _named(row: Row, *, alone: bool) -> str:
    """The proofs of a row: nothing if it is the one of its patch, their number if the row has all of them."""
    names = [label.partition("/")[2] for label in row.labels]
    if alone:
        return f"{len(names)} proofs" if len(names) > 1 else ""
    return (
        _short(names[0], LONGEST) if len(names) == 1 else f"{_short(names[0], LONGEST - 11)} and {len(names) - 1} more"
    )


def _short(name: str, most: int) -> str:
    """At most so many letters, whole words, and dots if some are left out."""
    return name if len(name) <= most else f"{name[: most - 3].rpartition('-')[0]}..."


def _places(releases: Sequence[str], left: int, step: int) -> Iterator[int]:
    """Where the column of each release begins."""
    x = left
    for before, release in zip(("", *releases), releases):
        x += SPLIT if before and _series(before) != _series(release) else 0
        yield x
        x += step


def _series(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _head(releases: Sequence[str], places: Sequence[int], y: int, wide: int = CELL - 2) -> str:
    """ "0.12" above ".0 .1 .2 .3", each in the middle of what is `wide`."""
    parts = []
    for series, found in groupby(zip(releases, places), key=lambda pair: _series(pair[0])):
        inside = list(found)
        parts.append(_text((inside[0][1] + inside[-1][1] + wide) / 2, y - 18, series, "ink", "middle"))
        parts += [_text(x + wide / 2, y - 6, release.removeprefix(series), "faint", "middle") for release, x in inside]
    return "".join(parts)


def _shapes(row: Row, releases: Sequence[str], places: Sequence[int], y: int) -> Iterator[str]:
    for verdict, found in groupby(range(len(releases)), key=lambda place: row.verdicts[place]):
        span = list(found)
        first, last = span[0], span[-1]
        where = releases[first] if first == last else f"{releases[first]} to {releases[last]}"
        said = f"{', '.join(row.labels)}, {where}: {LEGEND.get(verdict, verdict)}"
        yield (
            f'<rect x="{places[first]}" y="{y}" width="{places[last] + CELL - places[first] - 2}" height="{ROW}" '
            f"{_fill(verdict)}><title>{_escaped(said)}</title></rect>"
        )


def _fill(verdict: str) -> str:
    fill = PALETTE.get(verdict, PALETTE["not fixed"])
    return f'fill="{fill}"' if fill != "none" else 'fill="var(--faint)" fill-opacity="0.15"'


def _legend(rows: Sequence[Row], width: float) -> str:
    """Every state that the picture has, in two columns."""
    there = {verdict for row in rows for verdict in row.verdicts}
    found = [(state, text) for state, text in LEGEND.items() if state in there]
    parts = [
        _text(SIDE, 20, "Each defect on each release of megatron-core, as its proof has measured it", "ink", size=13)
    ]
    for number, (state, text) in enumerate(found):
        x, y = SIDE + (number % 2) * (width - 2 * SIDE) * 0.55, 32 + number // 2 * 18
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="{CELL - 2}" height="{ROW}" {_fill(state)}/>')
        parts.append(_text(x + 18, y + 9, text, "ink"))
    return "".join(parts)


WIDE, HIGH, LINE, STEP = 720, 238, 196, 31  # of the picture of all releases, its lower line, and a column


def bars(counts: Mapping[str, Mapping[str, int]], title: str) -> str:
    """A bar for each release, of a part for each symptom. counts: release -> symptom -> number of defects."""
    releases = list(counts)
    places = list(_places(releases, SIDE, STEP))
    scale = (LINE - 66) / max((sum(found.values()) for found in counts.values()), default=1)
    parts = [_text(SIDE, 22, title, "ink", size=14)]
    x = float(SIDE)
    for name in (name for name in TONES if any(found.get(name) for found in counts.values())):
        parts.append(f'<rect x="{x:.0f}" y="34" width="10" height="10" rx="2" fill="var(--{name})"/>')
        parts.append(_text(x + 15, 43, SAID[name], "ink", size=11))
        x += 30 + 6.2 * len(SAID[name])
    for release, left in zip(releases, places):
        found, y = counts[release], float(LINE)
        for name in (name for name in TONES if found.get(name)):
            y -= found[name] * scale
            said = f"megatron-core {release}: {found[name]} {SAID[name]}"
            parts.append(
                f'<rect x="{left}" y="{y:.1f}" width="{STEP - 5}" height="{max(found[name] * scale - 1, 0.8):.1f}" '
                f'fill="var(--{name})"><title>{_escaped(said)}</title></rect>'
            )
        parts.append(_text(left + (STEP - 5) / 2, y - 5, str(sum(found.values())), "ink", "middle", 11))
    parts.append(_head(releases, places, LINE + 34, STEP - 5))
    return _whole(WIDE, HIGH, title, f"{both_schemes('svg')} {tones('svg')}", parts)


SAID = {
    "silent": "silent: wrong numbers",
    "crash": "crash",
    "hang": "hang",
    "memory": "more memory or time than needed",
    "missing": "missing feature",
}


def _whole(width: float, height: float, title: str, style: str, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img" '
        f'font-family="sans-serif" font-size="10.5"><title>{_escaped(title)}</title><style>{style}</style>'
        f'<rect {size} fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, colour: str, anchor: str = "", size: float = 0) -> str:
    more = f' text-anchor="{anchor}"' if anchor else ""
    more += f' font-size="{size:g}"' if size else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="var(--{colour})"{more}>{_escaped(text)}</text>' if text else ""


def _escaped(text: str) -> str:
    return escaped_html(masked(text))
