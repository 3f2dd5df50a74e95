"""Text for people: lines wrapped with a hanging indent, and on a terminal colour for problems, headings and verdicts.

A pipe or a file gets 80 columns, as it is mostly read in a pager or pasted; COLUMNS says how many else, and --json is
for programs. There is no dependency: rich is not on most machines that train, and two ways to print would have to be
kept alike.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TextIO

__all__ = ["coloured", "for_stream", "wrapped"]

PIPED = 80  # columns of what goes to no terminal
FILLED = 70  # columns at least of a line of prose that goes on in the next one
LEAST = 40  # columns, below which wrapping makes text worse
# The columns in front of the text of a line: an id, a word or two, each with two blanks behind it.
_COLUMNS = re.compile(r" *(?:\S+(?: \S+){0,3} {2,}){1,3}(?=\S)")
_NO_PROSE = re.compile(r"[\s\-*|#`!]|[0-9]+\. ")
_BULLET = re.compile(r" *[-!*] ")
_AS_IT_IS = re.compile(r"\||#| {4,}[-+@]| {8}")  # tables and headings of Markdown, lines of a diff and of code

RED, GREEN, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[1m", "\033[0m"
_BAD = r"not fixed|not reproduced|made worse|broken|drifted|gone|lost|conflict|failed|shadowed|unknown"
_GOOD = r"fixed|right|apply|applied|upstream|not needed"
_PAINTS = (
    (re.compile(r"^(Problems:|Not applied, [^\n]*:)$", re.MULTILINE), RED + BOLD),
    (re.compile(r"\b([1-9][0-9]* (?:problems?|not fixed|broken|drifted))\b"), RED),
    (re.compile(r"^(\S[^\n|]*:|Fixed: [^\n:]+)$", re.MULTILINE), BOLD),
    (re.compile(rf"^(?: {{2,}})({_BAD})(?=  |:|$)", re.MULTILINE), RED),
    (re.compile(rf"^(?: {{2,}})({_GOOD})(?=  |:|$)", re.MULTILINE), GREEN),
    (re.compile(rf"\(({_BAD})\)$", re.MULTILINE), RED),
    (re.compile(rf"(?<=: |  )({_BAD})(?=, [0-9.]+ s$|$)", re.MULTILINE), RED),
    (re.compile(rf"(?<=: |  )({_GOOD})(?=, [0-9.]+ s$|$)", re.MULTILINE), GREEN),
    (re.compile(r"^ *(Remedy:)", re.MULTILINE), BOLD),
    (re.compile(r"^ *(!)(?= )", re.MULTILINE), RED),
)


def for_stream(text: str, stream: TextIO | None, environ: Mapping[str, str] = os.environ) -> str:
    """The text as a stream shows it: wrapped, and on a terminal coloured.

    COLUMNS is its width, if it is set. NO_COLOR and TERM=dumb keep colour off.
    """
    if stream is None:
        return text
    width = _columns(stream, environ.get("COLUMNS", ""))
    if width >= LEAST:
        text = wrapped(text, width)
    colour = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    return coloured(text) if colour else text


def _columns(stream: TextIO, given: str) -> int:
    if given.isdigit():
        return int(given)
    if not stream.isatty():
        return PIPED
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # ValueError: a stream without a file
        return 0


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most `width` columns, but for words that are longer, tables and code."""
    fenced = False
    lines: list[str] = []
    for line in list(_paragraphs_joined(text.split("\n")))[:-1]:
        fence = line.startswith("```")
        fenced = fenced != fence
        lines += [line] if fenced or fence or _AS_IT_IS.match(line) else _wrapped(line, width)
    return "\n".join(lines)


def _paragraphs_joined(lines: list[str]) -> Iterator[str]:
    """The lines, with each paragraph in one: a block of prose without indents, filled up to some hundred columns."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line:
            block.append(line)
            continue
        prose = all(len(one) >= FILLED for one in block[:-1]) and not any(_NO_PROSE.match(one) for one in block)
        yield from [" ".join(block)] if block and prose else block
        block = []
        yield line


def _wrapped(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    columns = _COLUMNS.match(line) or _BULLET.match(line)
    start = columns.end() if columns else len(line) - len(line.lstrip())
    first, rest = line[:start], line[start:]
    # A sentence hangs, a paragraph does not.
    hang = start if columns or (not start and len(line) > 2 * width) else start + 2
    if hang > width // 2:  # the columns take a line, and the text stands below
        yield first.rstrip()
        indent = len(line) - len(line.lstrip()) + 4
        yield from _filled(rest, width, " " * indent, " " * indent)
    else:
        yield from _filled(rest, width, first, " " * hang)


def _filled(text: str, width: int, first: str, later: str) -> list[str]:
    words = [part for word in text.split(" ") for part in _parts(word, width - len(later))]
    return textwrap.wrap(
        " ".join(words),
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _parts(word: str, room: int, marks: str = ":/.") -> Iterator[str]:
    """A word that is longer than a line, such as a search path or `module:function`, broken behind marks.

    marks: the first that serves is taken.
    """
    if len(word) <= room or not marks:
        yield word
        return
    part = ""
    for piece in re.findall(rf"[^{marks[0]}]*{re.escape(marks[0])}|[^{marks[0]}]+$", word):
        if part and len(part) + len(piece) > room:
            yield from _parts(part, room, marks[1:])
            part = ""
        part += piece
    yield from _parts(part, room, marks[1:])


def coloured(text: str) -> str:
    """The text with colours of a terminal: what is wrong in red, what is right in green, headings in bold."""
    for pattern, paint in _PAINTS:
        text = pattern.sub(lambda found, paint=paint: _painted(found, paint), text)  # type: ignore[misc]
    return text


def _painted(found: re.Match[str], paint: str) -> str:
    if "\033" in found[0]:
        return found[0]
    start, end = found.start(1) - found.start(), found.end(1) - found.start()
    return f"{found[0][:start]}{paint}{found[0][start:end]}{PLAIN}{found[0][end:]}"
