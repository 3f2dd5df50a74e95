"""The tables of lost names: their pairs of releases (measured), and their remedies (judged by people)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["TE", "FILE", "MEGATRON", "expanded", "remedies", "spans", "table"]

MEGATRON, TE = "megatron-core", "transformer-engine"
FILE = Path(__file__).with_name("lost_names.json")  # measured
REMEDIES = Path(__file__).with_name("te_remedies.json")  # judged by hand


def spans(releases: Iterable[str], order: Sequence[str]) -> str:
    """`releases` in short, as stretches of `order`: "2.1.0 - 2.5.0, 2.15.0"."""
    chosen = set(releases)
    stretches: list[list[str]] = []
    for index, release in enumerate(order):
        if release not in chosen:
            continue
        if index and order[index - 1] in chosen:
            stretches[-1][1] = release
        else:
            stretches.append([release, release])
    return ", ".join(first if first == last else f"{first} - {last}" for first, last in stretches)


def expanded(text: str, order: Sequence[str]) -> Iterator[str]:
    """The releases of which `spans` made `text`."""
    for stretch in text.split(", "):
        first, _, last = stretch.partition(" - ")
        yield from order[order.index(first) : order.index(last or first) + 1]


@lru_cache(maxsize=1)
def table() -> Mapping[str, Any]:
    return json.loads(FILE.read_text("utf-8"))


@lru_cache(maxsize=1)
def remedies() -> Mapping[str, Any]:
    return json.loads(REMEDIES.read_text("utf-8"))
