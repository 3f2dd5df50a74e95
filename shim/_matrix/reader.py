"""Reading YAML with places, and what a matrix says in it: every error carries file and line."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from shim._errors import MatrixError, SourceError
from shim._matrix.declared import BOUNDS, TYPES, Commit, Declared
from shim._matrix.model import DISTRIBUTIONS, RIGHT, Decided, Variant
from shim._matrix.pins import FINGERPRINT
from shim._releases.fingerprint import split_target
from shim._releases.versions import parse_range, parse_version, with_prereleases

__all__ = [
    "COMMIT_KEYS",
    "NAME_LENGTH",
    "OPTION_KEYS",
    "Reader",
    "compose",
    "read_commits",
    "read_decided",
    "read_declared",
]

# Styles of scalars that are text. The C loader and the Python loader differ on plain scalars.
QUOTED = ("'", '"', "|", ">")
AFTER_A_COLON = "mapping values are not allowed in this context"  # what YAML says of it, in both loaders
TEXT_LIMIT = 20_000  # characters of a line, and brackets in the text. The whole text may have a hundred times that.


def compose(file: Path, content: bytes) -> yaml.Node:
    """The document in `content`, the content of `file`. MatrixError if it is empty, damaged or made to be slow."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MatrixError(f"{file}:1: is not UTF-8: {error}") from None
    # Deep nesting overruns the C stack of libyaml's loader. It takes many brackets, long lines or deep indentation.
    long = any(len(line) > TEXT_LIMIT for line in text.splitlines())
    if long or text.count("[") + text.count("{") > TEXT_LIMIT or len(text) > 100 * TEXT_LIMIT:
        raise MatrixError(f"{file}:1: is too large, or nested too deeply, to be a matrix")
    try:
        document = yaml.compose(_Named(text, file), Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = "; Remedy: quote the text, which has a colon" if error.problem == AFTER_A_COLON else ""
        raise MatrixError(f"{file}:{line}: {error.problem}{hint}") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise MatrixError(f"{file}:1: {error}") from None
    if document is None:
        raise MatrixError(f"{file}:1: is empty")
    return document


class _Named(io.StringIO):
    """A text with the name that its marks are to have, so that each node knows its file."""

    def __init__(self, text: str, file: Path) -> None:
        super().__init__(text)
        self.name = str(file)


class Reader:
    """Reads composed YAML documents. Every error carries file and line.

    package: what a module with a dot in front lies in, such as megatron.core.
    """

    def __init__(self, path: str, package: str = "") -> None:
        self.path = path
        self.package = package

    def fail(self, node: yaml.Node | None, message: str) -> MatrixError:
        if node is None:
            return MatrixError(f"{self.path}:1: {message}")
        return MatrixError(f"{node.start_mark.name}:{node.start_mark.line + 1}: {message}")

    def mapping(self, node: yaml.Node, what: str, keys: Mapping[str, bool] | None = None) -> dict[str, yaml.Node]:
        """The entries of a mapping. `keys` names the allowed keys, and says of each whether it is required."""
        if not isinstance(node, yaml.MappingNode) or not node.tag.endswith(":map"):
            raise self.fail(node, f"{what} must be a mapping")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.fail(key, f"a key of {what} must be text")
            if key.tag.endswith(":merge"):
                raise self.fail(key, f"{what} must be written out, without <<")
            if key.value in found:
                raise self.fail(key, f"duplicate key {key.value!r} in {what}")
            if keys is not None and key.value not in keys:
                raise self.fail(key, f"unknown key {key.value!r} in {what}; known are {', '.join(keys)}")
            found[key.value] = value
        for name, required in (keys or {}).items():
            if required and name not in found:
                raise self.fail(node, f"{what} lacks {name!r}")
        return found

    def sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode) or not node.tag.endswith(":seq"):
            raise self.fail(node, f"{what} must be a list")
        return node.value

    def text(self, node: yaml.Node, what: str, choices: Sequence[str] = ()) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(":str"):
            raise self.fail(node, f"{what} must be text")
        if not node.value.strip():
            raise self.fail(node, f"{what} is empty")
        if choices and node.value not in choices:
            raise self.fail(node, f"{what} is {node.value!r}; it must be one of {', '.join(choices)}")
        return node.value

    def texts(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        return tuple(self.text(item, f"an entry of {what}") for item in self.sequence(node, what))

    def flag(self, node: yaml.Node, what: str) -> bool:
        value = self.scalar(node, what)
        if not isinstance(value, bool):
            raise self.fail(node, f"{what} must be true or false")
        return value

    def quoted(self, node: yaml.Node, what: str) -> str:
        """Text in quotes. Without quotes YAML reads 0.20 as the number 0.2, and fails on some ranges."""
        if not isinstance(node, yaml.ScalarNode) or node.style not in QUOTED[:2]:
            shown = getattr(node, "value", "")
            raise self.fail(node, f"{what} must be a quoted version string, not {shown}")
        return node.value

    def version(self, node: yaml.Node, what: str) -> str:
        value = self.quoted(node, what)
        if parse_version(value) is None:
            raise self.fail(node, f"{what} is {value!r}, which is not a PEP 440 version")
        return value

    def range(self, node: yaml.Node, what: str) -> str:
        """A range of releases. A pre-release belongs to its release, see with_prereleases."""
        value = with_prereleases(self.quoted(node, what))
        try:
            parse_range(value)
        except ValueError as error:
            raise self.fail(node, f"{what}: {error}") from None
        return value

    def target(self, node: yaml.Node, what: str, module: str = "") -> str:
        """``module:qualname``. A qualname alone is one of `module`, if that is given."""
        value = self.text(node, what)
        if module and ":" not in value:
            value = f"{module}:{value}"
        if self.package and value.startswith("."):
            value = self.package + value.removeprefix("." if value.startswith(".:") else "")
        try:
            split_target(value)
        except SourceError as error:
            raise self.fail(node, str(error)) from None
        return value

    def scalar(self, node: yaml.Node, what: str) -> Any:
        """A number, text, true, false or null."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(node, f"{what} must be a single value")
        try:
            value = node.value if node.style in QUOTED else yaml.safe_load(node.value)
        except (yaml.YAMLError, ValueError) as error:
            raise self.fail(node, f"{what} cannot be read: {error}") from None
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise self.fail(node, f"{what} must be a number, text, true, false or null")
        return value


# Commits

NAME_LENGTH = 10  # the hexadecimal digits of a commit that name it
COMMIT_KEYS = {"commit": True, "version": True, "date": True, "of": True}
HASH = re.compile(r"[0-9a-f]{40}")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def read_commits(
    read: Reader, node: yaml.Node, supported: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Commit]]:
    """The commits in `node` by distribution and name, in the order of their dates. MatrixError names file and line."""
    found: dict[str, dict[str, Commit]] = {}
    for distribution, commits in read.mapping(node, "commits", dict.fromkeys(DISTRIBUTIONS, False)).items():
        before = ""
        for name, item in read.mapping(commits, f"commits of {distribution}").items():
            commit = _commit(read, name, item)
            if name in supported.get(distribution, ()):
                raise read.fail(item, f"{name} is both a release and a commit of {distribution}")
            if commit.date < before:
                raise read.fail(item, f"commit {name} is of {commit.date}, but stands after one of {before}")
            before = commit.date
            found.setdefault(distribution, {})[name] = commit
    return found


def _commit(read: Reader, name: str, node: yaml.Node) -> Commit:
    given = read.mapping(node, f"commit {name}", COMMIT_KEYS)
    texts = {key: read.quoted(given[key], f"the {key} of commit {name}") for key in ("commit", "date")}
    if not HASH.fullmatch(texts["commit"]):
        raise read.fail(given["commit"], f"{texts['commit']!r} is not a commit: 40 hexadecimal digits, in lower case")
    if name != texts["commit"][:NAME_LENGTH]:
        first = texts["commit"][:NAME_LENGTH]
        raise read.fail(node, f"a commit is named by its first {NAME_LENGTH} digits: {first}, not {name}")
    if not _is_day(texts["date"]):
        raise read.fail(given["date"], f"the date of commit {name} is {texts['date']!r}; write it as 2026-08-22")
    return Commit(
        name,
        texts["commit"],
        read.version(given["version"], f"the version of commit {name}"),
        texts["date"],
        read.text(given["of"], f"what commit {name} is of"),
    )


def _is_day(text: str) -> bool:
    if not DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


# What people decided of bodies

DECIDED_KEYS = dict.fromkeys(("target", "body", "as", "note"), True)


def read_decided(read: Reader, node: yaml.Node, variants: Mapping[str, Variant]) -> Iterator[Decided]:
    """The entries of `decided`. Each is about a body of a variant, or of any variant if a release is right."""
    for item in read.sequence(node, "decided"):
        given = read.mapping(item, "an entry of decided", DECIDED_KEYS)
        gives = read.text(given["as"], "as", (*variants, *RIGHT))
        target, body = read.target(given["target"], "target"), read.text(given["body"], "body")
        having = [variants[gives]] if gives in variants else variants.values()
        if not any(target in variant.bodies for variant in having):
            raise read.fail(item, f"{target} is no body of {f'variant {gives}' if gives in variants else 'a variant'}")
        if not re.fullmatch(FINGERPRINT, body):
            raise read.fail(given["body"], f"{body!r} is not a fingerprint, as shim audit and shim pin print it")
        yield Decided(target, body, gives, read.text(given["note"], "note"))


# Options of patches

OPTION_KEYS = {"default": True, **dict.fromkeys(("type", "choices", "minimum", "maximum", "above", "switch"), False)}


def read_declared(read: Reader, name: str, node: yaml.Node) -> Declared:
    """An option: a mapping of OPTION_KEYS, or just the default. Then shim checks nothing but the type."""
    if not isinstance(node, yaml.MappingNode):
        return Declared(name, default := read.scalar(node, name), _type(read, name, node, default, None))
    given = read.mapping(node, f"option {name}", OPTION_KEYS)
    default = read.scalar(given["default"], f"default of {name}")
    kind = read.text(given["type"], f"type of {name}", tuple(TYPES)) if "type" in given else None
    kind = _type(read, name, node, default, kind)
    choices = read.texts(given["choices"], f"choices of {name}") if "choices" in given else ()
    bounds = {key: _number(read, given[key], f"{key} of {name}") for key in BOUNDS if key in given}
    switch = "switch" in given and read.flag(given["switch"], f"switch of {name}")
    if switch and default is not False:
        raise read.fail(node, f"option {name}: a switch is false by default")
    if (choices and kind != "str") or (bounds and kind not in ("int", "float")):
        raise read.fail(node, f"option {name}: choices belong to text, and {', '.join(BOUNDS)} to numbers")
    found = Declared(name, default, kind, choices, **bounds, switch=switch)
    try:
        return replace(found, default=found.checked(default))
    except ValueError as error:
        raise read.fail(given["default"], f"the default of {name} {error}") from None


def _type(read: Reader, name: str, node: yaml.Node, default: Any, kind: str | None) -> str:
    if kind is not None:
        return kind
    if default is None:
        raise read.fail(node, f"option {name} has no default to tell its type; say {{default: null, type: ...}}")
    return type(default).__name__


def _number(read: Reader, node: yaml.Node, what: str) -> float:
    value = read.scalar(node, what)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise read.fail(node, f"{what} must be a finite number")
    return value
