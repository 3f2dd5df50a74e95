"""Foreign text inside of Markdown and HTML: it stays text, and makes no link, no picture and no cell."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from shim._printing.printable import one_line, printable

__all__ = ["cell", "code", "escaped_html", "fence_of", "inline", "plain"]

_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
# An underscore inside of a word, and the tilde of a home directory, mean nothing to Markdown.
_SPECIAL = re.compile(r"([\\`*\[\]<&#@]|(?<![^\W_])_+|_+(?![^\W_])|~(?!/)|^>|(?<=[\w\"'/-])>(?!=))")


def inline(text: object) -> str:
    """One line of text in which nothing is Markdown but code between backticks."""
    said, shown, end = one_line(text), [], 0
    for span in _CODE.finditer(said):
        shown += [_escaped(said[end : span.start()]), span[0]]
        end = span.end()
    return "".join([*shown, _escaped(said[end:])])


def plain(text: object) -> str:
    """One line of text in which nothing is Markdown, code neither: for text that shim has no word in."""
    return _escaped(one_line(text)).replace("|", r"\|")


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: "".join("\\" + each for each in found[0]), text)


def cell(text: object) -> str:
    """The same for the cell of a table, which a bar would end even in code."""
    return re.sub(r"(?<!\\)\|", r"\\|", inline(text))


def code(text: object) -> str:
    """One line of text as code, between more backticks than it has in a row."""
    said = one_line(text)
    ticks = "`" * (_longest_run([said]) + 1)
    room = " " if said[:1] == "`" or said[-1:] == "`" or not said else ""
    return f"{ticks}{room}{said}{room}{ticks}"


def fence_of(lines: Iterable[str]) -> str:
    """A fence that none of the lines closes."""
    return "`" * max(3, 1 + _longest_run(lines))


def _longest_run(lines: Iterable[str]) -> int:
    return max((len(run) for line in lines for run in re.findall("`+", line)), default=0)


def escaped_html(text: str) -> str:
    """Text as HTML text or as the value of an attribute. Its line ends stay."""
    return html.escape(printable(text))
