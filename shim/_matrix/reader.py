"""Reading YAML with places: every error carries file and line."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shim._errors import MatrixError, SourceError
from shim._releases.fingerprint import split_target
from shim._releases.versions import parse_range, parse_version, with_prereleases

__all__ = ["Reader", "compose"]

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
