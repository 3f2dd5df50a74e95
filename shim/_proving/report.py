"""Results for a terminal, as Markdown to paste into an issue, and as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shim._printing.markdown import escaped_html, fence_of, plain
from shim._printing.masks import masked
from shim._printing.printable import one_line, printable
from shim._proving.results import Outcome, Result, summary

__all__ = ["Heading", "as_data", "as_markdown", "as_text", "heading_of"]

WIDTH = 120  # columns of a line in a pipe
_TRACEBACK = 5  # lines of its end that a terminal gets; --json has all of it
NAMES = ("megatron-core", "torch", "transformer-engine")


class Heading:
    """Where the proofs ran: the releases and the device.

    releases: by name; those that are not installed are left out. device: "CPU", or the name of the GPU.
    """

    def __init__(
        self, releases: dict[str, str], device: str, ranks: int | None, model: str = "", tree: str = ""
    ) -> None:
        self.releases = releases
        self.device = device
        self.ranks = ranks
        self.model = model
        self.tree = tree

    def __str__(self) -> str:
        ranks = f"{self.ranks or 2} gloo ranks where needed" if self.ranks != 1 else "one rank"
        parts = [f"{name} {self.releases[name]}" for name in NAMES if name in self.releases]
        parts += [f"{self.device} ({ranks})"]
        parts += [f"model {self.model}"] if self.model else []
        parts += [f"sources {self.tree}"] if self.tree else []
        return masked(one_line(", ".join(parts)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "releases": self.releases,
            "device": self.device,
            "ranks": self.ranks,
            "model": self.model,
            "tree": self.tree,
        }


def as_text(
    heading: Heading, results: Sequence[Result], overrides: Sequence[str] = (), width: int | None = None
) -> str:
    """Each proof that ran, the others by their reasons, and a summary.

    width: of the terminal; None for a pipe. If a line for each proof does not fit, each takes three.
    """
    ran = [result for result in results if result.stock is not None and result.verdict != "cannot run"]
    rows = [_row(result) for result in ran]
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(4)]
    narrow = sum(widths) + 20 > (WIDTH if width is None else width)
    lines = [str(heading), ""]
    for row, result in zip(rows, ran, strict=True):
        label, _, _, verdict, seconds = row
        if narrow:
            lines.append(f"{label}: {', '.join(filter(None, (verdict, seconds)))}")
            lines += [f"    {_said(*side, whole=True)}" for side in _sides(result) if _said(*side)]
        else:
            cells = [cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)]
            lines.append("   ".join([*cells, seconds]).rstrip())
        if result.failed:
            lines += [f"    {line}" for line in _why(result)]
        elif result.part:
            lines.append(f"    {result.part}")
        if result.audit:
            lines.append(f"    shim audit: {one_line(result.audit)}")
    left = [result for result in results if result.verdict == "cannot run"]
    for reason in dict.fromkeys(result.reason for result in left):
        labels = ", ".join(result.label for result in left if result.reason == reason)
        lines += ["", f"Cannot run here, because {one_line(reason)} ({labels})."]
    lines += ["", *map(one_line, overrides)] if overrides else []
    return "\n".join([*lines, "", summary(results)])


def _why(result: Result) -> list[str]:
    """Why a proof has failed: the reason, what was measured, and where a proof without a result has raised."""
    sides = [(name, side) for name, side in _sides(result) if side is not None]
    numbers = [f"{name} {side.value:g}" for name, side in sides if side.value is not None and math.isfinite(side.value)]
    lines = [one_line(result.reason)]
    lines += [f"measured: {', '.join(numbers)}; right up to {result.bound:g}"] if numbers else []
    for name, side in sides:
        raised = side.details.strip().splitlines()[-_TRACEBACK:] if side.state == "broken" else []
        lines += [f"{name}: {one_line(line)}" for line in raised]
    return lines


def _sides(result: Result) -> tuple[tuple[str, Outcome | None], ...]:
    return ("stock", result.stock), ("with shim", result.patched)


def _row(result: Result) -> tuple[str, str, str, str, str]:
    stock, patched = (_said(*side) for side in _sides(result))
    seconds = f"{result.seconds:.1f} s" if result.seconds else ""
    return result.label, stock, patched, result.verdict, seconds


def _said(side: str, outcome: Outcome | None, whole: bool = False) -> str:
    if outcome is None or outcome.state == "cannot run":
        return ""
    text = one_line(outcome.text)
    text = text if whole or len(text) <= 60 else f"{text[:57]}..."
    return f"{side}: {text}"


def as_markdown(heading: Heading, results: Sequence[Result], overrides: Sequence[str] = ()) -> str:
    """A table, and below it each proof with its reproduction, folded up: to paste into an issue."""
    lines = [f"### shim prove: {_cell(str(heading))}", ""]
    lines += ["| defect | stock | with shim | |", "|---|---|---|---|"]
    for result in results:
        sides = [_cell(side.text) if side is not None else "" for side in (result.stock, result.patched)]
        why = result.reason if result.failed else result.part
        verdict = f"{result.verdict}: {why}" if why else result.verdict
        verdict += f" (shim audit: {result.audit})" if result.audit else ""
        lines.append(f"| {result.label} | {' | '.join(sides)} | {_cell(verdict)} |")
    lines += ["", summary(results)]
    lines += ["", *(f"- {_cell(line)}" for line in overrides)] if overrides else []
    for result in results:
        if result.reproduction and result.stock is not None:
            lines += [
                "",
                f"<details><summary>{result.label}: {escaped_html(masked(one_line(_first(result))))}</summary>",
                "",
            ]
            fence = fence_of([result.source])
            lines += [printable(masked(result.reproduction)), "", f"{fence}python"]
            lines += [printable(masked(result.source.rstrip())), fence, "", "</details>"]
    return "\n".join(lines)


def _first(result: Result) -> str:
    return result.reproduction.splitlines()[0]


def _cell(text: str) -> str:
    return plain(masked(text))


def as_data(heading: Heading, results: Sequence[Result], overrides: Sequence[dict[str, str]] = ()) -> dict[str, Any]:
    """Everything, as plain data with stable keys (docs/cli.md)."""
    return {
        "where": heading.to_dict(),
        "proofs": {result.label: result.to_dict() for result in results},
        "overrides": list(overrides),
        "summary": summary(results),
        "failed": [result.label for result in results if result.failed],
    }


def heading_of(
    releases: dict[str, str | None], device: str, ranks: int | None, model: str = "", tree: str = ""
) -> Heading:
    """The heading for the installed releases, a GPU by its name."""
    known = {name: releases[name] or "of unknown version" for name in NAMES if name in releases}
    if device != "cuda":
        return Heading(known, "CPU", ranks, model, tree)
    import torch

    return Heading(known, torch.cuda.get_device_name(), ranks, model, tree)
