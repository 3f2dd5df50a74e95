"""One table of facts for each trainer: its settings that say what concerns a run. They are in trainers.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shim._configs.settings import MEGATRON, Table

__all__ = ["SIZES", "TRAINERS", "Trainer"]

SIZES = ("tp", "cp", "pp", "ep")
MEGATRONS = "megatron-core"  # in the file, the conditions of megatron-core's own settings


@dataclass(frozen=True)
class Trainer:
    """What is known of a trainer. The conditions are those of shim._configs.settings.

    marks: settings, or ends of sections with settings, by any of which its files are known.
    programs: words in a command, by any of which its scripts are known.
    fork_of: the trainer whose marks it has. Of a file with these it is the trainer if the file has its name.
    settings: the conditions of each word, instead of those of megatron-core.
    left_out: sections of engines that generate, and of other backends.
    engines: keys of a section that name its engine. The section counts if the value has "megatron" in it.
    with_megatron, without: conditions that say whether it trains with megatron at all.
    by_default: what holds of a word if no setting decides it. Nothing of a word whose default comes from elsewhere.
    without_by_default: whether a script trains without megatron unless a setting says otherwise.
    implied: word -> the word from which it follows, as sequence parallelism from tensor parallelism.
    configs: program -> the package and the name of the config that it reads.
    sizes_from: where sizes come from that FILE does not set, if not from defaults.
    """

    name: str
    marks: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    fork_of: str = ""
    settings: Table = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    with_megatron: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    by_default: Mapping[str, bool] = field(default_factory=dict)
    without_by_default: bool = False
    implied: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    sizes_from: str = ""

    @property
    def table(self) -> Table:
        return {**MEGATRON, **self.settings}


def _trainers() -> Iterator[Trainer]:
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    for given in content["trainers"]:
        given = {name: tuple(_flat(value)) if isinstance(value, list) else value for name, value in given.items()}
        given["settings"] = {word: tuple(_conditions(word, said)) for word, said in given["settings"].items()}
        given["by_default"] = {said.removeprefix("no "): said[:3] != "no " for said in given.get("by_default", ())}
        yield Trainer(**given)


def _flat(values: list[Any]) -> Iterator[str]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else [value]


def _conditions(word: str, said: list[str]) -> Iterator[str]:
    for condition in said:
        yield from MEGATRON[word] if condition == MEGATRONS else [condition]


TRAINERS = tuple(_trainers())
