"""Changes of version_matrix.yaml as text, so that its comments and its order stay."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from packaging.version import Version

from shim._errors import MatrixError
from shim._matrix.declared import Commit
from shim._matrix.model import NOT_NEEDED, RIGHT

__all__ = ["top_bound", "with_commit", "with_new_range", "with_release", "with_wider_ranges"]

WIDTH = 120
RANGE = re.compile(r">=\s*([0-9.]+)\s*,\s*<\s*([0-9.]+)")
UPPER = re.compile(r"(<\s*)([0-9]+(?:\.[0-9]+)*)(?=\s*(?:,|$))")


def _node(text: str) -> yaml.MappingNode:
    """The document. Both loaders tell places in characters."""
    node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert isinstance(node, yaml.MappingNode), "a matrix that was read is a mapping"
    return node


def _get(node: yaml.Node | None, key: str) -> Any:
    """The value of a key. None if there is none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)


def with_release(text: str, distribution: str, release: str) -> str:
    """`text` with `release` in the supported list of `distribution`, at its place by version."""
    listed = _get(_get(_node(text), "supported"), distribution)
    if not isinstance(listed, yaml.SequenceNode) or not listed.value:
        raise MatrixError(f"there is no supported list of {distribution} with a release in it; write the first by hand")
    before = [item for item in listed.value if Version(item.value) < Version(release)]
    if not listed.flow_style:
        line = (before[-1] if before else listed.value[0]).start_mark.line + bool(before)
        lines = text.splitlines(keepends=True)
        indent = " " * (listed.value[0].start_mark.column - 2)
        return "".join([*lines[:line], f'{indent}- "{release}"\n', *lines[line:]])
    start, end = listed.start_mark.index, listed.end_mark.index
    if "#" in text[start:end]:  # a comment would be lost by writing the list anew
        place = (before[-1].end_mark if before else listed.value[0].start_mark).index
        return text[:place] + (f', "{release}"' if before else f'"{release}", ') + text[place:]
    names = [item.value for item in before] + [release] + [item.value for item in listed.value[len(before) :]]
    indent = " " * (listed.start_mark.column + 1)
    wrapped = textwrap.fill(
        ", ".join(f'"{name}"' for name in names), WIDTH - 1, initial_indent=indent, subsequent_indent=indent
    )
    return text[:start] + "[" + wrapped.lstrip() + "]" + text[end:]


def with_commit(text: str, distribution: str, commit: Commit) -> str:
    """`text` with `commit` under the commits of `distribution`, at its place by date."""
    top = _node(text)
    commits = _get(top, "commits")
    known = _get(commits, distribution)
    entry = _entry(commit)
    lines = text.splitlines(keepends=True)
    if known is not None:
        later = [key for key, value in known.value if _get(value, "date").value > commit.date]
        line = _above(lines, later[0].start_mark.line) if later else _end(known)
        return "".join([*lines[:line], entry, *lines[line:]])
    if commits is not None:
        line = _end(commits)
        return "".join([*lines[:line], f"  {distribution}:\n", entry, *lines[line:]])
    line = _end(_get(top, "supported"))
    return "".join([*lines[:line], f"\ncommits:\n  {distribution}:\n", entry, *lines[line:]])


def _entry(commit: Commit) -> str:
    lines = [
        f'    "{commit.name}":',
        f'      commit: "{commit.commit}"',
        f'      version: "{commit.version}"',
        f'      date: "{commit.date}"',
        f"      of: {commit.of}",
    ]
    return "\n".join(lines) + "\n"


def _above(lines: list[str], line: int) -> int:
    """The first line of the comment that stands right above `line`."""
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line


def _end(node: yaml.Node) -> int:
    """The line after the last of a block. The marks of the block itself lie where the next one begins."""
    while isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node.end_mark.line + 1


def _ranges(text: str, id: str) -> Iterator[tuple[str, Any]]:
    """Every rule of a patch, with the variant that it gives: a name, or one of RIGHT."""
    patch = _get(_get(_node(text), "patches"), id)
    if _get(patch, "variants") is None:  # the patch is described in its folder
        for name, value in patch.value:
            for rule in _rules(value) if name.value != "module" else ():
                yield name.value.replace("not_needed", NOT_NEEDED), rule
        return
    for name, variant in _get(patch, "variants").value:
        for rule in _rules(_get(variant, "applies")):
            yield name.value, rule
    for rule in _rules(_get(patch, "applies")):
        yield _get(rule, "variant").value, rule
    for right in RIGHT:
        for rule in _rules(_get(patch, right.replace("-", "_"))):
            yield right, rule


def _rules(node: yaml.Node | None) -> list[Any]:
    if node is None:
        return []
    return node.value if isinstance(node, yaml.SequenceNode) else [node]


def _spec(rule: Any, distribution: str) -> Any:
    """The range of a rule over the distribution that the patch is of. None if it has none."""
    return rule if isinstance(rule, yaml.ScalarNode) else _get(rule, distribution)


def _upper(spec: str) -> str | None:
    """The upper bound of a range, as it is written."""
    found = UPPER.search(spec)
    return None if found is None else found[2]


def top_bound(text: str, id: str, distribution: str, release: str) -> tuple[str, set[str]] | None:
    """The bound that `release` lies at or above, and the variants whose ranges end there. None if none does.

    That is the newest bound of the patch: a release in a gap between ranges, or below all of them, has none.
    """
    bounds = [
        (bound, variant)
        for variant, rule in _ranges(text, id)
        if (spec := _spec(rule, distribution)) is not None and (bound := _upper(spec.value)) is not None
    ]
    if not bounds:
        return None
    top = max((bound for bound, _ in bounds), key=Version)
    if Version(release) < Version(f"{top}.dev0"):
        return None
    return top, {variant for bound, variant in bounds if bound == top}


def with_wider_ranges(text: str, id: str, distribution: str, variant: str, old: str, new: str) -> str:
    """`text` with ``<new`` for ``<old`` in every range over `distribution` that gives `variant` of patch `id`."""
    places = {  # an alias stands for the same place again
        (spec.start_mark.index, spec.end_mark.index)
        for name, rule in _ranges(text, id)
        if name == variant and (spec := _spec(rule, distribution)) is not None and _upper(spec.value) == old
    }
    for start, end in sorted(places, reverse=True):
        inner = UPPER.sub(lambda found: found[1] + new, text[start + 1 : end - 1])  # a range stands in quotes
        text = text[: start + 1] + inner + text[end - 1 :]
    return text


def with_new_range(
    text: str, id: str, distribution: str, gives: str, begin: str, end: str, note: str = ""
) -> str | None:
    """`text` in which patch `id` has a range from `begin` on that gives a variant, or one of RIGHT.

    A range that holds `begin` ends there, and the new one ends where that did; or else at `end`. note: why a release is
    right.

    None if a person has to write it: if a range is about several distributions, or begins no earlier, or is written in
    several lines, or if the patch is described in the matrix.
    """
    patch = _get(_get(_node(text), "patches"), id)
    if not isinstance(patch, yaml.MappingNode) or _get(patch, "variants") is not None:
        return None
    changes = []
    for _, rule in _ranges(text, id):
        spec = _spec(rule, distribution)
        about = {key.value for key, _ in rule.value} if isinstance(rule, yaml.MappingNode) else {distribution}
        found = None if spec is None else RANGE.fullmatch(spec.value)
        if found is None or about - {distribution, "note"}:
            return None
        low, high = found.groups()
        if Version(low) < Version(begin) < Version(high):
            changes.append((spec.start_mark.index, spec.end_mark.index, f'">={low},<{begin}"'))
            end = high
        elif Version(low) == Version(begin):
            return None
    item = f'">={begin},<{end}"'
    if gives in RIGHT:
        item = f"{{{distribution}: {item}, note: {json.dumps(note, ensure_ascii=False)}}}"
    key, value = gives.replace("-", "_"), _get(patch, gives.replace("-", "_"))
    lines = [len(line) for line in text.splitlines(keepends=True)]
    if value is None:
        place, indent = sum(lines[: _end(patch)]), " " * patch.value[0][0].start_mark.column
        changes.append((place, place, f"{indent}{key}: {item}\n"))
    elif isinstance(value, yaml.SequenceNode) and not value.flow_style:
        place, indent = sum(lines[: _end(value)]), " " * value.start_mark.column
        changes.append((place, place, f"{indent}- {item}\n"))
    elif value.start_mark.line == value.end_mark.line and not isinstance(value, yaml.SequenceNode):
        indent = "\n" + " " * (patch.value[0][0].start_mark.column + 2)
        start, stop = value.start_mark.index, value.end_mark.index
        changes.append((start - 1, stop, f"{indent}- {text[start:stop]}{indent}- {item}"))  # with the blank before it
    else:
        return None
    for start, stop, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[stop:]
    return text
