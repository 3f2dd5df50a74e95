"""All that the files of --config say: one tree of settings for each command that may train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shim._configs.arguments import Given, given_by, is_trained
from shim._configs.files import Search
from shim._configs.python_files import given_in
from shim._configs.shell import Script
from shim._configs.trainers import Trainer
from shim._configs.values import Tree, merged
from shim._configs.yaml_files import composed, mapping_of
from shim._errors import OptionError

__all__ = ["Reading", "read_all"]

_HYDRAS_OWN = ("config_name", "config_path")


@dataclass
class Reading:
    """What the files say together.

    own: the settings that the named files hold themselves, for the notes. texts: all that these files hold.
    """

    runs: list[Tree] = field(default_factory=list)
    own: list[Tree] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def read_all(paths: Sequence[str], search: Search, trainers: Sequence[Trainer]) -> Reading:
    """The files one over the other. OptionError if one cannot be read, or has no settings."""
    found = Reading()
    for path in paths:
        before = len(search.others)
        runs = list(_read(Path(path), search, found, trainers))
        if not runs:
            others = ", ".join(search.others[before:])
            what = "neither a YAML mapping, nor --flags, nor a.b=c"
            what += f". It runs {others}, which was not found" if others else ""
            raise OptionError(f"{search.asked} {path} has no settings: {what}")
        found.runs = [merged(below, above) for below in found.runs or [{}] for above in runs]
    return found


def _read(file: Path, search: Search, found: Reading, trainers: Sequence[Trainer]) -> Iterator[Tree]:
    text = search.text_of(file)
    found.texts.append(text)
    if file.suffix in (".yaml", ".yml", ".json"):
        yield from _of_yaml(file, text, search, found)
        return
    if file.suffix == ".py":
        given = given_in(text, file)
        if given.settings:
            found.programs.append(given.program)
            found.own.append(given.settings)
            yield given.settings
        return
    try:
        is_mapping = not text.startswith("#!") and mapping_of(text, str(file)) is not None
        wrong = None
    except OptionError as error:
        is_mapping, wrong = False, error
    if is_mapping:
        yield from _of_yaml(file, text, search, found)
        return
    runs = list(_of_script(file, text, search, found, trainers))
    if not runs and wrong is not None and not text.startswith("#!") and file.suffix != ".sh":
        raise wrong
    yield from runs


def _of_yaml(file: Path, text: str, search: Search, found: Reading) -> Iterator[Tree]:
    own = mapping_of(text, f"{search.asked} {file}")
    if not own:
        return
    own.pop("defaults", None)
    found.own.append(own)
    tree = composed(file, search)
    if tree:
        yield tree


def _of_script(file: Path, text: str, search: Search, found: Reading, trainers: Sequence[Trainer]) -> Iterator[Tree]:
    script = Script(search, file)
    search.enter(file, "")
    script.read(text)
    search.leave()
    every = [given_by(command.words) for command in script.commands]
    named = [given for given in every if given.settings or given.files]
    training = [given for given in named if is_trained(given)]
    if not any(_is_large(given) for given in training):  # a list of arguments, for other scripts
        unused = [value for name, values in script.variables.items() if name not in script.used for value in values]
        given = given_by([word for value in unused for word in (value.split() if "--" in value else [value])])
        training = [*training, given] if given.settings else training
    if not training:
        training = named
    largest = max((len(_leaves(given.settings)) for given in training), default=0)
    # Beside the training itself, a script starts Ray, prints and makes folders.
    for given in training:
        count = len(_leaves(given.settings))
        if given.files or count * 3 >= largest:
            if given.program:
                found.programs.append(given.program)
            found.own.append({k: v for k, v in given.settings.items() if k not in _HYDRAS_OWN})
            below = _files_of(given, file, search, trainers)
            yield merged(merged(below, given.settings), {"program": given.program, "choices": dict(given.choices)})


def _is_large(given: Given) -> bool:
    return bool(given.files) or len(_leaves(given.settings)) > 3


def _leaves(tree: Mapping[str, object]) -> list[object]:
    return [leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


def _files_of(given: Given, file: Path, search: Search, trainers: Sequence[Trainer]) -> Tree:
    """The settings of the files that a command names, and of the config that its program reads."""
    found: Tree = {}
    for name in given.files:
        place = search.find(name, file.parent)
        if place is None or not place.is_file():
            search.miss(str(file), name)
        elif (tree := composed(place, search, by=f"{file}, {name}")) is not None:
            found = merged(found, tree)
    config = _hydras(given, file, search, trainers)
    return merged(found, config)


def _hydras(given: Given, file: Path, search: Search, trainers: Sequence[Trainer]) -> Tree:
    name, folder = given.settings.get("config_name"), given.settings.get("config_path")
    package = next(
        (
            config
            for trainer in trainers
            for program, config in trainer.configs.items()
            if program in given.program.split()
        ),
        None,
    )
    if name is None and package is None:
        return {}
    name = str(name or (package and package[1])).removesuffix(".yaml")
    own = search.find_in_package(package[0], file.parent) if package else None
    places = [own]
    if isinstance(folder, str):  # relative to the program, for Hydra
        places = [own and own.parent / folder, search.find(folder, file.parent)]
    for place in [*places, *search.folders]:
        if place is not None and (place / f"{name}.yaml").is_file():
            choices = given.choices
            return composed(place / f"{name}.yaml", search, choices, f"{file}, --config-name {name}") or {}
    if package is None or name != package[1]:
        search.miss(str(file), f"--config-name {name}")
    return {}
