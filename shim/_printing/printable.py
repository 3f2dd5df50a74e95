"""Text for messages: foreign text that moves no cursor, hides nothing and begins no line; the spelling of a wrong name.

Versions, paths, variables, messages and names of objects may hold anything. An escape sequence rewrites a terminal, a
line end writes a heading into a report, a bidi control shows other text than there is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

__all__ = ["LIMIT", "all_of", "did_you_mean", "fits", "nearest", "one_line", "one_of", "printable"]

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


# The right spelling of a wrong name: names that contain it or lie within it, else the nearest by edits

SHORTEST = 3  # letters. A shorter name is part of too many others.
MOST = 3
NAMED = 20  # names that a message lists. It says of more only how many there are.


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known`, nearest first: the same but for case and hyphens, one within the other, similar."""
    import difflib  # here, because most names are right

    by_plain = {_plain(one): one for one in known}
    wanted = _plain(name.strip())
    if wanted in by_plain:
        return [by_plain[wanted]]
    similar = difflib.get_close_matches(wanted, by_plain, MOST, 0.6)
    held = [one for one in by_plain if min(len(one), len(wanted)) >= SHORTEST and (wanted in one or one in wanted)]
    # Prefer the names that contain little more than `name`.
    held.sort(key=lambda one: (one not in similar, abs(len(one) - len(wanted))))
    return [by_plain[one] for one in dict.fromkeys([*held, *similar])][:MOST]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A half sentence for an error message: the nearest of `known`, or a few of them. "" if `known` is empty."""
    names = list(known)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return _asked(name, names) or (f"known are {', '.join(names[:NAMED])}{more}" if names else "")


def one_of(name: object, known: Iterable[str]) -> str:
    """The same for a few choices. It names all of them: "one of a, b; did you mean 'a'?"."""
    return f"one of {all_of(name, known)}"


def all_of(name: object, known: Iterable[str]) -> str:
    """The same without the first words: "a, b; did you mean 'a'?"."""
    names = list(known)
    return "; ".join(filter(None, (", ".join(names), _asked(name, names))))


def _asked(name: object, known: list[str]) -> str:
    found = [repr(one) for one in nearest(name, known)] if isinstance(name, str) else []
    if not found:
        return ""
    return f"did you mean {' or '.join(filter(None, (', '.join(found[:-1]), found[-1])))}?"
