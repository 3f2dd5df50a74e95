"""The tables of docs/benchmarks.md from docs/device.json, which benchmarks/device.py writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["device_tables"]

RESULTS = "device.json"  # in docs/
STOCK = "stock"
COLUMNS = ("host_reads", "blocking_copies", "launches", "bytes_moved")
INTRODUCTION = """\
Host reads / blocking copies / launches / kB that launches move, in a step of one rank: on stock, with all patches, and
with each patch alone whose counts differ from stock's. torch {torch}."""
OF_KERNELS = """\
Registers of a thread / bytes of shared memory, the most of all variants. Spilled: bytes. triton {triton}."""


def device_tables(docs: Path) -> str:
    """Counts of steps and of kernels, in Markdown."""
    found = json.loads((docs / RESULTS).read_text("utf-8"))
    releases: Mapping[str, Any] = found["releases"]
    torch = ", ".join(sorted({release["torch"] for release in releases.values()}))
    return "\n".join(
        [
            INTRODUCTION.format(torch=torch),
            "",
            *_steps({release: each["steps"] for release, each in releases.items()}),
            "",
            OF_KERNELS.format(triton=found["triton"]),
            "",
            *_kernels(found["kernels"]),
        ]
    )


def _steps(releases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterable[str]:
    """releases: release -> step -> side -> its counts, or its error."""
    yield f"| step | with | {' | '.join(releases)} |"
    yield "|---|---|" + "---|" * len(releases)
    for step in dict.fromkeys(name for steps in releases.values() for name in steps):
        sides = dict.fromkeys(side for steps in releases.values() for side in steps.get(step, {}))
        for number, side in enumerate(sides):
            cells = [_counts(steps.get(step, {}), side) for steps in releases.values()]
            yield f"| {'' if number else step} | {side} | {' | '.join(cells)} |"


def _counts(sides: Mapping[str, Any], side: str) -> str:
    if side not in sides:
        return "as stock" if sides else "-"
    if isinstance(sides[side], str):
        return sides[side].partition(":")[0]
    reads, copies, launches, size = (sides[side][name] for name in COLUMNS)
    return f"{reads} / {copies} / {launches:,} / {round(size / 1000):,}"


def _kernels(found: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    capabilities = sorted({each["capability"] for each in found})
    yield "| kernel | variants | " + " | ".join(f"sm_{capability}" for capability in capabilities) + " | spilled |"
    yield "|---|---|" + "---|" * (len(capabilities) + 1)
    for kernel in dict.fromkeys(each["kernel"] for each in found):
        mine = [each for each in found if each["kernel"] == kernel]
        cells = []
        for capability in capabilities:
            of_it = [each for each in mine if each["capability"] == capability]
            cells.append(f"{max(each['registers'] for each in of_it)} / {max(each['shared'] for each in of_it):,}")
        spilled = max(each["spilled"] for each in mine)
        yield f"| `{kernel}` | {len(mine) // len(capabilities)} | {' | '.join(cells)} | {spilled} |"
