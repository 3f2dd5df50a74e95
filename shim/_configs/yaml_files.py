"""A YAML or JSON file with the files that its `defaults` name, as NeMo-RL and Hydra follow them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shim._configs.files import Search
from shim._configs.values import OPEN, Listed, Tree, key_of, merged, put
from shim._errors import OptionError

__all__ = ["Hydra", "composed", "mapping_of"]

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_CHOICE = re.compile(r"\$\{([\w@./]+)\}")


class _Loader(yaml.SafeLoader):
    """SafeLoader for which a tag that it does not know is a value that the file does not say."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: OPEN)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: OPEN)


def mapping_of(text: str, name: str) -> Tree | None:
    """The settings of a text in YAML or JSON. None if it is no mapping. OptionError names the line if it is no YAML."""
    try:
        documents = [item for item in yaml.load_all(text, _Loader) if item is not None]
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise OptionError(f"{name}{where} is no YAML: {getattr(error, 'problem', None) or error}") from None
    found = [_tree(item) for item in documents if isinstance(item, Mapping)]
    return found[0] if found and len(found) == len(documents) else None


def _tree(content: Mapping[Any, Any]) -> Tree:
    tree: Tree = {}
    for key, value in content.items():
        held = _node(value)
        if key == "defaults":
            tree["defaults"] = value
        elif isinstance(key, str) and "." in key and " " not in key:
            put(tree, key, held)  # Hydra's overrides may name several keys at once
        else:
            tree[key_of(key)] = merged(tree.get(key_of(key)), held)
    return tree


def _node(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _tree(value)
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return Listed({str(place): _tree(item) for place, item in enumerate(value)})  # as teachers or roles
    return value


def composed(file: Path, search: Search, choices: Mapping[str, str] | None = None, by: str = "") -> Tree | None:
    """The settings of a file and of those that its `defaults` name. None if it holds no mapping."""
    return Hydra(file.parent, search, choices or {}).read(file, (), by)


class Hydra:
    """Composes configs: `group@package: option`, `_self_`, and paths of files, in the order in which they are named."""

    def __init__(self, root: Path, search: Search, choices: Mapping[str, str]) -> None:
        self.roots = [root, *search.folders]
        self.search = search
        self.choices = dict(choices)  # what the command line or an `override` chose for a group
        self.chosen: dict[str, str] = {}  # what lists of defaults chose, for ${group} in other entries

    def read(self, file: Path, package: tuple[str, ...], by: str) -> Tree | None:
        """The settings of a file, below `package`, which is where its own defaults go too."""
        text = self.search.text_of(file)
        tree = mapping_of(text, str(file))
        if tree is None:
            return None
        self.search.enter(file, by)
        defaults = tree.pop("defaults", None)
        self._add_roots(tree, file)
        header = _PACKAGE.search(text)
        if header and header[1] == "_global_":
            package = ()
        found: Tree = {}
        own = _below(package, tree)
        entries = list(_entries(defaults))
        if not any(entry == "_self_" for entry, _ in entries):
            entries.append(("_self_", None))
        for name, option in entries:  # an override counts for what stands before it, too
            if name.startswith("override "):
                self.choices.setdefault(name.removeprefix("override ").strip(), str(option))
        for name, options in entries:
            if name.startswith("override "):
                continue
            if name == "_self_":
                found = merged(found, own)
                continue
            for option in options if isinstance(options, list) else [options]:
                found = merged(found, self._one(file, package, name, option, text))
        self.search.leave()
        return found

    def _add_roots(self, tree: Tree, file: Path) -> None:
        """Hydra's own searchpath: file://verl/trainer/config, pkg://verl.trainer.config."""
        hydra = tree.get("hydra")
        for place in (hydra.get("searchpath") if isinstance(hydra, dict) else None) or ():
            kind, _, name = str(place).partition("://")
            find = self.search.find_in_package if kind == "pkg" else self.search.find
            folder = find(name, file.parent)
            if folder is None:
                self.search.miss(str(file), str(place))
            else:
                self.roots.append(folder)

    def _one(self, file: Path, package: tuple[str, ...], name: str, option: Any, text: str) -> Tree:
        """What one entry of a list of defaults brings."""
        kind, _, rest = name.rpartition(" ")
        group, _, goes = rest.partition("@")
        if option is None and _is_path(group):
            return self._file(file, package, group, goes, text)
        chosen = self.choices.get(rest, self.choices.get(group.strip("/"), option))
        if option is not None and chosen is not None:
            self.chosen[group] = str(chosen)
        if option is not None and chosen in (None, "null"):
            return {}
        where = f"{group}/{chosen}" if option is not None else group
        where = self._with_choices(where)
        folder = "" if where.startswith("/") else self._group_of(file)
        path = _normal(f"{folder}/{where}")
        below = package if option is None else (*package, *_normal(group).split("/"))
        if goes:
            below = _goes(goes, package, _normal(group).split("/") if option is not None else [])
        beside = file.parent / (where + ".yaml")  # a group beside the file, if the file itself is in no known folder
        places = [root / (path + ".yaml") for root in self.roots] + [beside]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            if kind != "optional" and "$" not in where:
                self.search.miss(str(file), where.lstrip("/"))
            elif "$" in where:
                self.search.miss(str(file), f"{rest}: {chosen}")
            return {}
        return self.read(found, below, self._named(file, text, name, option)) or {}

    def _file(self, file: Path, package: tuple[str, ...], name: str, goes: str, text: str) -> Tree:
        """A config named by its path, as NeMo-RL does, and ROLL without the suffix."""
        name = self._with_choices(name)
        with_suffix = name if name.endswith((".yaml", ".yml", ".json")) else name + ".yaml"
        found = file.parent / with_suffix
        if not found.is_file():
            places = [folder / with_suffix for folder in self.search.folders]
            places += [folder / Path(with_suffix).name for folder in self.search.folders]
            found = next((place for place in places if place.is_file()), found)
        if not found.is_file():
            self.search.miss(str(file), name)
            return {}
        below = _goes(goes, package, []) if goes else package
        return self.read(found, below, self._named(file, text, name, None)) or {}

    def _with_choices(self, name: str) -> str:
        return _CHOICE.sub(lambda use: str(self.choices.get(use[1], self.chosen.get(use[1], use[0]))), name)

    def _group_of(self, file: Path) -> str:
        """The group that a file belongs to: the folder that it lies in, below the folder of all groups."""
        for root in self.roots:
            if file.parent.resolve().is_relative_to(root.resolve()):
                return "/" + file.parent.resolve().relative_to(root.resolve()).as_posix().strip(".")
        return ""

    @staticmethod
    def _named(file: Path, text: str, name: str, option: Any) -> str:
        """File and line of an entry, for an error."""
        word = str(option) if option is not None else name
        lines = text.splitlines()
        start = next((n for n, line in enumerate(lines) if line.startswith("defaults")), 0)
        line = next((n for n in range(start, len(lines)) if word in lines[n]), start)
        return f"{file}, line {line + 1} (defaults)"


def _entries(defaults: Any) -> list[tuple[str, Any]]:
    """Pairs of a name and an option, which is None for a config that is named alone."""
    if isinstance(defaults, str):
        return [(defaults, None)]
    items = list(defaults.values()) if isinstance(defaults, dict) else defaults or []
    found: list[tuple[str, Any]] = []
    for item in items if isinstance(items, list) else []:
        if isinstance(item, Mapping):
            found += [(str(key), "null" if value is None else value) for key, value in item.items()]
        else:
            found.append((str(item), None))
    return found


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml", ".json")) or name.startswith(("../", "./"))


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return "/".join(parts)


def _goes(goes: str, package: tuple[str, ...], group: list[str]) -> tuple[str, ...]:
    """The package that an entry gives: relative to that of its file, unless it begins with _global_."""
    first, *rest = goes.split(".")
    if first == "_global_":
        return tuple(rest)
    if first == "_here_":
        return (*package, *rest)
    if first == "_group_":
        return (*package, *group, *rest)
    return (*package, first, *rest)


def _below(package: tuple[str, ...], tree: Tree) -> Tree:
    for part in reversed(package):
        tree = {key_of(part): tree}
    return tree
