"""What settings say of a run, by the table of its trainer, and what a user is told of how that is known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shim._configs.files import Search
from shim._configs.misspelt import perhaps_misspelt
from shim._configs.reading import Reading
from shim._configs.settings import OPEN, Table, judged, names_in
from shim._configs.trainers import SIZES, Trainer
from shim._configs.values import flattened
from shim._matrix.concerns import IMPLIED, WORDS, Run, given_facts, words_named

__all__ = ["Setting", "Verdict"]

NAMED = 20  # settings that a note lists
FOLLOWED = 5  # files that it lists
_ALLOCATION = re.compile(r"megatron[.:](\([^)]*\)|\w+)")

Setting = tuple[tuple[str, ...], Any]  # the path of its keys, and its value


@dataclass
class Verdict:
    """What the settings say, by the table of their trainer."""

    trainer: Trainer
    table: Table
    settings: list[Setting]
    reading: Reading
    search: Search
    file: str

    def __post_init__(self) -> None:
        self.counted = self.without_others(self.settings)
        self.of_name = _by_name([*self.counted, *_allocated(self.settings)])
        # Sections that are left out may show that it is another engine that trains. If a file is missing, only what
        # the files themselves say counts, and not what they are based on.
        own = [setting for tree in self.reading.own for setting in flattened(tree)]
        others = _by_name(own if self.search.missing else self.settings)
        self.without = judged(self.trainer.without, lambda name: others.get(name, ()))

    def without_others(self, settings: Sequence[Setting]) -> list[Setting]:
        """The settings of what is trained: none of engines that generate, or of sections with another engine."""
        left_out = set(self.trainer.left_out)
        others = {
            keys[:-1]
            for keys, value in settings
            if keys[-1] in self.trainer.engines and isinstance(value, str) and "megatron" not in value.lower()
        }

        def counts(keys: tuple[str, ...]) -> bool:
            if set(keys[:-1]) & left_out:
                return False
            return keys[-1] in self.trainer.engines or not any(keys[: len(other)] == other for other in others if other)

        return [(keys, value) for keys, value in settings if counts(keys)]

    @property
    def chosen(self) -> Any:
        """Whether the settings say that it trains with megatron: OPEN or None if that is not known."""
        return judged(self.trainer.with_megatron, self.read)

    @property
    def is_run(self) -> bool:
        return bool(self.reading.programs) or any(len(keys) > 1 for keys, _ in self.settings)

    def read(self, name: str) -> Sequence[Any]:
        return self.of_name.get(name, ())

    def run(self, te_is_installed: bool, words: str | None) -> Run:
        found = {word: judged(entries, self.read) for word, entries in self.table.items()}
        facts = {word: holds for word, holds in found.items() if isinstance(holds, bool)}
        unresolved = {word for word, holds in found.items() if holds is OPEN}
        if words is None and self.trains_otherwise():
            facts = {**dict.fromkeys(WORDS, False), "te": te_is_installed, "no-te": not te_is_installed}
            return Run(facts, "a run without megatron", tuple(self.notes_without()))
        # A list of arguments for other scripts, such as those of a model, is no whole configuration.
        whole = not self.search.missing and (self.is_run or any(word in facts for word in SIZES))
        whole = whole and (not self.trainer.with_megatron or self.chosen not in (None, False))
        defaults = self.trainer.by_default if whole else {}
        assumed = {word: holds for word, holds in defaults.items() if word not in facts and word not in unresolved}
        facts.update(assumed)
        for word, cause in self.trainer.implied.items():
            if cause in facts and word not in facts:
                facts[word] = facts[cause]
        if facts.get("tp") is False:
            facts["sp"] = False
        for word, implied in IMPLIED.items():
            if any(facts.get(one) is False for one in implied):
                facts.setdefault(word, False)
        if facts.get("ep"):
            facts["moe"] = True
        named = words_named(words) if words else ()
        facts.update(dict.fromkeys(named, True))
        holding = [word for word in WORDS if facts.get(word)]
        notes = tuple(self.notes(unresolved - set(named), assumed, set(facts)))
        if named:
            notes = (f"named by --for: {', '.join(named)}", *notes)
        facts.update(given_facts(te_is_installed))
        what = f"with {', '.join(holding)}" if holding else "for which no word is known to hold"
        return Run(facts, f"a run {what}", notes)

    def trains_otherwise(self) -> bool:
        """Whether the settings say that it does not train with megatron."""
        if self.chosen is True or self.without is True:
            return self.chosen is not True
        if self.chosen is OPEN:
            return False
        ran = any(program in command for command in self.reading.programs for program in self.trainer.programs)
        return self.trainer.without_by_default and ran and not self.search.missing

    def notes_without(self) -> Iterator[str]:
        name = self.trainer.name
        if self.without is True:
            yield f"{self.file} trains with another engine of {name} than megatron, so no patch concerns it"
        else:
            yield f"{self.file} does not choose megatron, and {name} trains with another engine by default"
        yield from self.notes_on_files()

    def notes(self, unresolved: set[str], assumed: Mapping[str, bool], decided: set[str]) -> Iterator[str]:
        table, known = self.table, self.names()
        own = [setting for tree in self.reading.own for setting in flattened(tree)]
        counted = self.without_others(own)
        saying = [keys for keys, _ in counted if keys[-1] in known]
        name = f", as those of {self.trainer.name}" if self.trainer.name else ""
        yield f"{len(saying)} of {len(own)} settings in {self.file} say what is trained{name}; the others are ignored"
        if len(counted) < len(own):
            yield f"{len(own) - len(counted)} of them belong to an engine that generates, or to another backend"
        yield from self.notes_on_files()
        yield from _of_ignored(dict.fromkeys(keys[-1] for keys, _ in counted if keys[-1] not in known), known)
        if unresolved:
            open_names = {n for word in unresolved for n in names_in({word: table[word]}) if OPEN in self.read(n)}
            yield f"not known, because their values are not in {self.file}: {', '.join(sorted(open_names))}"
        if silent := [word for word in SIZES if assumed.get(word) is False]:
            yield f"{', '.join(silent)}: size 1, the default of {self.trainer.name}"
        if others := [
            ("" if holds else "no ") + w for w, holds in assumed.items() if w not in SIZES and w != "datasets"
        ]:
            yield f"by default of {self.trainer.name}: {', '.join(others)}"
        if unknown := [word for word in SIZES if word not in decided and word not in unresolved]:
            yield f"{', '.join(unknown)}: size unknown: {self.why_unknown()}"

    def why_unknown(self) -> str:
        if self.search.missing:
            file, what = self.search.missing[0]
            return f"{file} names {what}, which was not found; give --config-path"
        if self.trainer.with_megatron and self.chosen is not True:
            return f"{self.file} does not say whether {self.trainer.name} trains with megatron"
        if self.trainer.sizes_from:
            return f"{self.file} does not say, and {self.trainer.name} takes it from {self.trainer.sizes_from}"
        return f"{self.file} does not say, and is not known as the configuration of a trainer"

    def notes_on_files(self) -> Iterator[str]:
        if followed := list(dict.fromkeys(map(os.path.relpath, self.search.followed))):
            more = f" and {len(followed) - FOLLOWED} more" if len(followed) > FOLLOWED else ""
            yield f"followed: {', '.join(followed[:FOLLOWED])}{more}"
        for file, what in self.search.missing:
            yield f"{file} names {what}, which was not found: its settings are not known; give --config-path"
        for file, what in self.search.passed:
            yield f"{file} names {what}, which was not found; it is taken for a script that sets up an environment"

    def names(self) -> set[str]:
        """The names that the table reads, without the sections before them."""
        t = self.trainer
        names = names_in(self.table) | names_in({"": (*t.with_megatron, *t.without)})
        return {name.rpartition(".")[2] for name in names}


def _by_name(settings: Sequence[Setting]) -> dict[str, list[Any]]:
    """The values of each setting, by its name, and by up to two sections and its name."""
    found: dict[str, list[Any]] = {}
    for keys, value in settings:
        for depth in range(1, min(3, len(keys)) + 1):
            found.setdefault(".".join(keys[-depth:]), []).append(value)
    return found


def _allocated(settings: Sequence[Setting]) -> Iterator[Setting]:
    """The sizes in a string such as megatron:d4p2t2 or megatron:(attn:d4t2|ffn:d2e4), below `allocation`."""
    for _keys, value in settings:
        for found in _ALLOCATION.finditer(value) if isinstance(value, str) else ():
            sizes = dict.fromkeys("tpce", "1")
            for letter, size in re.findall(r"([tpce])(\d+)", found[1]):
                sizes[letter] = str(max(int(size), int(sizes[letter])))
            yield from ((("allocation", letter), size) for letter, size in sizes.items())


def _of_ignored(names: Mapping[str, None], known: set[str]) -> Iterator[str]:
    """The notes on settings that are ignored: those that may be misspelt first."""
    close = perhaps_misspelt(names, known)
    if close:
        yield f"ignored, and perhaps misspelt: {', '.join(f'{name} ({right}?)' for name, right in close.items())}"
    if others := [name for name in names if name not in close]:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        yield f"ignored: {', '.join(others[:NAMED])}{more}"
