"""Foreign text as text that can be printed: it moves no cursor, hides nothing, and begins no line.

Versions, paths, variables, messages and names of objects may hold anything. An escape sequence rewrites a terminal, a
line end writes a heading into a report, a bidi control shows other text than there is.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["LIMIT", "fits", "one_line", "printable"]

LIMIT = 2000  # characters of a foreign text in one line. The longest real search paths are shorter.
_MARKS = 3  # combining marks on one character. More of them run over the lines above and below.
_FOREIGN = re.compile(r"[^\x20-\x7e]+")
# Python calls them printable, and a reader sees nothing: fillers, variation selectors, and the blank of Braille.
_UNSEEN = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))
)


def printable(text: str, kept: str = "\n\t") -> str:
    r"""The text with all that cannot be seen written as an escape, such as ``\x1b``, but for the characters `kept`.

    Controls, bidi and zero-width characters, and surrogates of bytes that could not be decoded are such characters.
    """
    return _FOREIGN.sub(lambda run: _seen(run[0], kept), text)


def _seen(run: str, kept: str) -> str:
    shown, marks = [], 0
    for each in run:
        marks = marks + 1 if unicodedata.category(each) in ("Mn", "Me") else 0
        plain = each in kept or (each.isprintable() and each not in _UNSEEN and marks <= _MARKS)
        shown.append(each if plain else each.encode("unicode_escape").decode("ascii"))
    return "".join(shown)


def one_line(text: object, limit: int = LIMIT) -> str:
    """Any text as one printable line of `limit` characters, before escapes. Line ends become spaces."""
    said = str(text)
    if len(said) > limit:
        said = said[:limit] + "..."
    if not said.isprintable():
        said = " ".join(filter(None, (line.strip() for line in said.splitlines())))
    return printable(said, "")


def fits(text: str, encoding: str | None) -> str:
    r"""The text with all that `encoding` cannot hold written as ``\u20ac``, as Python prints to standard error."""
    try:
        name = encoding or "utf-8"
        return text.encode(name, "backslashreplace").decode(name)
    except (LookupError, UnicodeError):
        return text.encode("ascii", "backslashreplace").decode("ascii")
