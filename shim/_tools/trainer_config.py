"""`shim plan --config FILE`: what a trainer's own configuration says of a run.

A YAML or JSON file, a script, or a launcher in Python. shim._tools.configs reads them, and has one table per trainer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shim._errors import OptionError
from shim._matrix.concerns import Run
from shim._planning.settings import Table
from shim._tools.configs.files import Search
from shim._tools.configs.reading import read_all
from shim._tools.configs.trainers import (
    Trainer,
    areal,
    llama_factory,
    megatron_bridge,
    megatron_lm,
    miles,
    model_config,
    ms_swift,
    nemo_rl,
    roll,
    skyrl,
    slime,
    verl,
)
from shim._tools.configs.values import flattened, resolved
from shim._tools.configs.verdict import Setting, Verdict

__all__ = ["TRAINERS", "run_of_configs"]

# Of two that fit as well, the first.
_MODULES = (verl, nemo_rl, skyrl, areal, roll, miles, slime, ms_swift, llama_factory, megatron_bridge, megatron_lm)
TRAINERS: tuple[Trainer, ...] = (*(module.TRAINER for module in _MODULES), model_config.TRAINER)


def run_of_configs(
    paths: Sequence[str], te_is_installed: bool, folders: Sequence[str] = (), words: str | None = None
) -> Run:
    """What the files say, the later over the earlier, and beside them the words of --for.

    Settings that say nothing of the patches are ignored; notes count and name them. Raises OptionError if a file
    cannot be read, or has no settings.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise OptionError(f"--config-path {folder} is no folder")
    search = Search(tuple(Path(folder) for folder in folders))
    reading = read_all(paths, search, TRAINERS)
    settings = [setting for tree in reading.runs for setting in flattened(resolved(tree))]
    trainer = _trainer_of(settings, reading.programs)
    table = _with_model(trainer, settings)
    return Verdict(trainer, table, settings, reading, search, " and ".join(paths)).run(te_is_installed, words)


def _trainer_of(settings: Sequence[Setting], programs: Sequence[str]) -> Trainer:
    """The trainer whose marks most of the settings bear."""
    paths = {"." + ".".join(keys) + "." for keys, _ in settings}
    commands = " ".join(programs).lower()

    def likeness(trainer: Trainer) -> int:
        marks = sum(all(any(f".{one}." in p for p in paths) for one in mark.split(" & ")) for mark in trainer.marks)
        return marks + 2 * sum(bool(re.search(rf"(?<![a-z0-9]){re.escape(p)}", commands)) for p in trainer.programs)

    best = max(TRAINERS, key=likeness)
    return best if likeness(best) else Trainer("")


def _with_model(trainer: Trainer, settings: Sequence[Setting]) -> Table:
    """The table of the trainer, with that of a model's own config if one is among the files."""
    model = model_config.TRAINER
    if trainer is model or not any(".".join(keys) in model.marks for keys, _ in settings):
        return trainer.table
    return {word: (*entries, *model.settings.get(word, ())) for word, entries in trainer.table.items()}
