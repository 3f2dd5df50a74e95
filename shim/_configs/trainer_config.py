"""`shim plan --config FILE` and apply(concerns=FILE): what a trainer's own configuration says of a run.

A YAML or JSON file, a script, or a launcher in Python. shim._configs reads them, and has one table per trainer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shim._configs.files import Search
from shim._configs.reading import Reading, read_all
from shim._configs.settings import Table
from shim._configs.trainers import TRAINERS, Trainer
from shim._configs.values import flattened, resolved
from shim._configs.verdict import Setting, Verdict
from shim._errors import OptionError
from shim._matrix.concerns import UNSAID, WORDS, Run

__all__ = ["run_of_configs", "words_of_configs"]

MODEL = next(one for one in TRAINERS if one.name == "a model's own config")


def run_of_configs(
    paths: Sequence[str],
    te_is_installed: bool,
    folders: Sequence[str] = (),
    words: str | None = None,
    asked: str = "--config",
) -> Run:
    """What the files say, the later over the earlier, and beside them the words of --for.

    Settings that say nothing of the patches are ignored; notes count and name them. Raises OptionError if a file
    cannot be read, or has no settings.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise OptionError(f"--config-path {folder} is no folder")
    search = Search(tuple(Path(folder) for folder in folders), asked)
    reading = read_all(paths, search, TRAINERS)
    settings = [setting for tree in reading.runs for setting in flattened(resolved(tree))]
    trainer = _trainer_of(settings, reading)
    table = _with_model(trainer, settings)
    return Verdict(trainer, table, settings, reading, search, " and ".join(paths)).run(te_is_installed, words)


def words_of_configs(paths: Sequence[str], words: str | None, asked: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All words that the run of these files may have, and notes on that. What they do not say counts as held.

    So a patch is left out only if the files say that each of its alternatives lacks a word. Raises OptionError.
    """
    run = run_of_configs(paths, True, (), words, asked)
    may = [word for word in WORDS if word not in UNSAID and run.facts.get(word) is not False]
    unknown = [word for word in may if word not in run.facts]
    first = f"{' and '.join(paths)}: {run.words}"
    return tuple(may) or ("any",), (f"{first}; counted too, as not known: {', '.join(unknown) or 'none'}", *run.notes)


def _trainer_of(settings: Sequence[Setting], reading: Reading) -> Trainer:
    """The trainer whose marks most of the settings bear, or the fork of it that the files name."""
    paths = {"." + ".".join(keys) + "." for keys, _ in settings}
    commands = " ".join(reading.programs).lower()

    def likeness(trainer: Trainer) -> int:
        marks = sum(all(any(f".{one}." in p for p in paths) for one in mark.split(" & ")) for mark in trainer.marks)
        return marks + 2 * sum(bool(re.search(rf"(?<![a-z0-9]){re.escape(p)}", commands)) for p in trainer.programs)

    best = max(TRAINERS, key=likeness)
    if not likeness(best):
        return Trainer("")
    text = " ".join(reading.texts).lower()
    named = [fork for fork in TRAINERS if fork.fork_of == best.name and re.search(rf"(?<![a-z]){fork.name}", text)]
    return named[0] if named else best


def _with_model(trainer: Trainer, settings: Sequence[Setting]) -> Table:
    """The table of the trainer, with that of a model's own config if one is among the files."""
    if trainer is MODEL or not any(".".join(keys) in MODEL.marks for keys, _ in settings):
        return trainer.table
    return {word: (*entries, *MODEL.settings.get(word, ())) for word, entries in trainer.table.items()}
