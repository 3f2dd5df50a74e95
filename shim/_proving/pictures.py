"""Pictures of proofs as SVG: curves and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shim._printing.markdown import escaped_html
from shim._printing.masks import masked
from shim._proving.results import Outcome, Result

__all__ = ["DARK", "LIGHT", "PALETTE", "both_schemes", "picture"]

LIGHT = {
    "ink": "#1f2328",
    "faint": "#656d76",
    "paper": "#ffffff",
    "stock": "#cf222e",
    "shim": "#1a7f37",
    "truth": "#57606a",
}
DARK = {
    "ink": "#e6edf3",
    "faint": "#8b949e",
    "paper": "#0d1117",
    "stock": "#ff7b72",
    "shim": "#3fb950",
    "truth": "#8b949e",
}
# Colour of a cell by its verdict, seen beside LIGHT and DARK, and legible under white.
PALETTE = {
    "fixed": "#1f883d",
    "right": "#0969da",
    "upstream": "#0969da",
    "not fixed": "#cf222e",
    "cannot run": "#6e7781",
    "": "none",
}
WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 34
LETTER = 6.4  # the width of one, on average
TINY = 1e-9  # zero on a logarithmic axis


def picture(result: Result) -> str:
    """The curves of a run if the proof has them, else a bar for each side on a logarithmic axis, with the bound.

    Colours are those of the page: the CSS variables --ink, --faint, --stock, --shim, --truth.
    """
    return _curves(result) if result.stock is not None and result.stock.curves else _bars(result)


def _svg(body: Sequence[str], title: str, height: int = HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{_escaped(title)}</title>{"".join(body)}</svg>'
    )


def _curves(result: Result) -> str:
    lines: dict[str, tuple[str, Sequence[float]]] = {}
    for side, colour in ((result.stock, "stock"), (result.patched, "shim")):
        if side is not None and "measured" in side.curves:
            lines["stock" if colour == "stock" else "with shim"] = (colour, side.curves["measured"])
    truth = next((s.curves["truth"] for s in (result.stock, result.patched) if s and "truth" in s.curves), None)
    if truth is not None:
        lines["truth"] = ("truth", truth)  # last, so that it covers the curve that equals it
    points = [value for _, values in lines.values() for value in values if math.isfinite(value)]
    if not points:
        return _bars(result)
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    steps = max(len(values) for _, values in lines.values())

    def place(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / span
        return f"{x:.1f},{y:.1f}"

    body = [_frame(result.curve, f"{high:.3g}", f"{low:.3g}", steps)]
    names = WIDTH - RIGHT - sum(map(_named_width, lines))
    for name, (colour, values) in lines.items():
        finite = [place(step, value) for step, value in enumerate(values) if math.isfinite(value)]
        # Truth is dashed, so that the curve that equals it still shows.
        how = f'fill="none" stroke="var(--{colour})" stroke-width="2"'
        how += ' stroke-dasharray="5 4"' if name == "truth" else ""
        body.append(f'<polyline {how} points="{" ".join(finite)}"/>')
        body.append(f'<path {how} d="M{names:.0f} 10h18"/>{_text(names + 23, 14, name, "start", colour)}')
        names += _named_width(name)
    return _svg(body, f"{result.curve} of {steps} steps: {', '.join(lines)}")


def _named_width(name: str) -> float:
    return 40 + LETTER * len(name)


def _frame(name: str, high: str, low: str, steps: int) -> str:
    """Both axes, each with its name and its ends."""
    bottom = HEIGHT - BOTTOM
    return (
        f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="var(--faint)"/>'
        + _text(0, 14, name, "start", "faint")
        + _text(LEFT - 6, TOP + 8, high, "end", "faint")
        + _text(LEFT - 6, bottom, low, "end", "faint")
        + _text(LEFT, bottom + 16, "1", "middle", "faint")
        + _text((LEFT + WIDTH - RIGHT) / 2, bottom + 16, "step", "middle", "faint")
        + _text(WIDTH - RIGHT, bottom + 16, str(steps), "end", "faint")
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "ink") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="var(--{colour})">{_escaped(text)}</text>'


def _bars(result: Result) -> str:
    sides = [("stock", "stock", result.stock), ("with shim", "shim", result.patched)]
    known = [(name, colour, side) for name, colour, side in sides if side is not None and side.state != "cannot run"]
    values = [side.value for _, _, side in known if side.value is not None and math.isfinite(side.value)]
    top = max([*values, result.bound, TINY])
    bottom = min([value for value in (*values, result.bound) if value > 0] or [TINY])
    logarithmic = top / bottom > 50
    bound = _scaled(result.bound, top, bottom, logarithmic) if result.bound > 0 and values else None
    body, marks = [], ""
    for number, (name, colour, side) in enumerate(known):
        y = 14 + 42 * number
        length = _length(side, top, bottom, logarithmic)
        body.append(_text(0, y, name))
        body.append(_text(80, y, side.text if len(side.text) <= 58 else f"{side.text[:55]}...", "start", "faint"))
        body.append(f'<rect x="0" y="{y + 7}" width="{length:.0f}" height="12" rx="2" fill="var(--{colour})"/>')
        marks += "" if bound is None else f"M{bound:.0f} {y + 5}v17"  # across the bar, and through no text
    last = 42 * len(known)
    if bound is not None:
        body.append(f'<path d="{marks}" stroke="var(--ink)" stroke-width="1.5" stroke-dasharray="3 2"/>')
        anchor = "start" if bound < WIDTH / 2 else "end"
        body.append(_text(bound, last + 10, f"right up to {result.bound:.3g}", anchor, "faint"))
    if logarithmic:
        # On the side that the bound leaves free.
        x, anchor = (WIDTH - RIGHT, "end") if bound is None or bound < WIDTH / 2 else (0, "start")
        body.append(_text(x, last + 10, "logarithmic scale", anchor, "faint"))
    return _svg(body, "; ".join(f"{name}: {side.text}" for name, _, side in known), last + 16)


def _length(side: Outcome, top: float, bottom: float, logarithmic: bool) -> float:
    if side.value is None or not math.isfinite(side.value):
        return WIDTH - RIGHT  # a crash, or no number: as wrong as can be
    return max(2.0, _scaled(side.value, top, bottom, logarithmic))


def _scaled(value: float, top: float, bottom: float, logarithmic: bool) -> float:
    whole = WIDTH - RIGHT
    if not logarithmic:
        return whole * max(value, 0.0) / top
    # The least has a tenth of the width, so that it can be seen; nothing at all has none.
    return 0.0 if value <= 0 else whole * (0.1 + 0.9 * math.log(max(value, bottom) / bottom) / math.log(top / bottom))


def both_schemes(selector: str) -> str:
    """CSS that gives `selector` the colours as variables, by the reader's light or dark setting."""
    light, dark = ("; ".join(f"--{name}: {value}" for name, value in colours.items()) for colours in (LIGHT, DARK))
    return f"{selector} {{ {light} }} @media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"


def _escaped(text: str) -> str:
    return escaped_html(masked(text))
