"""The words of a shell script: statements of raw words, with quotes and expansions still in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ARRAY", "HERE", "HERE_QUOTED", "MAYBE", "NOT_SAID", "Token", "matching", "tokens_of"]

NOT_SAID = "\0"  # in a word: a part that the script does not say
MAYBE = "\1"  # before a word: it is there under a condition that is not known here
ARRAY = "array"
HERE = "heredoc"
HERE_QUOTED = "quoted heredoc"  # in which nothing is expanded
# The longer ones first, of those that begin alike.
_OPERATORS = (
    *(";;&", ";;", ";&", "&&", "||", "<<<", "<<-", "<<", ">>"),
    *("&>>", "&>", ">&", "<&", ">|", ";", "&", "|"),
)
_SINGLE = "()<>"
_PAIRS = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Token:
    """A word or an operator. kind: "word", "op", HERE, HERE_QUOTED, or ARRAY: NAME=( ... ), with its words."""

    kind: str
    text: str
    words: tuple[str, ...] = ()


def matching(text: str, at: int) -> int:
    """The place behind what begins at `at`: a quote, or $( ), ${ }, ( ), with all that is nested in it."""
    opening = text[at]
    if opening == "'":
        end = text.find("'", at + 1)
        return len(text) if end < 0 else end + 1
    closing = opening if opening in '"`' else _PAIRS[opening]
    at += 1
    while at < len(text):
        sign = text[at]
        if sign == "\\":
            at += 2
        elif sign == closing:
            return at + 1
        elif sign == "#" and opening == "(" and text[at - 1] in " \t\n(":  # a comment, whose quotes count for nothing
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif sign == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = matching(text, at + 1)
        elif (sign in "\"'`" and closing != '"' and sign != closing) or (sign == opening and opening in _PAIRS):
            at = matching(text, at)
        else:
            at += 1
    return len(text)


def tokens_of(text: str) -> Iterator[Token]:
    """All words and operators. A here-document is a token in the place of its operator."""
    at = 0
    text = text.replace("\\\r\n", " ").replace("\\\n", " ").replace("\r\n", "\n")
    while at < len(text):
        sign = text[at]
        if sign == "\n":
            yield Token("op", "\n")
            at += 1
        elif sign in " \t":
            at += 1
        elif sign == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif operator := next((one for one in _OPERATORS if text.startswith(one, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                word, at = _word(text, _after_blanks(text, at))
                end = text.find("\n", at)
                body, behind = _body(text, len(text) if end < 0 else end + 1, word.strip("\"'\\"))
                yield Token(HERE if word[:1] not in ("'", '"', "\\") else HERE_QUOTED, body)
                text = text[:at] + (text[at:end] if end >= 0 else "") + text[behind:]
            else:
                yield Token("op", operator)
        elif sign in _SINGLE:
            yield Token("op", sign)
            at += 1
        else:
            word, at = _word(text, at)
            if word.endswith("=") and text[at : at + 1] == "(" and _is_name(word.rstrip("+=")):
                end = matching(text, at)
                inside = text[at + 1 : end - 1]
                yield Token(ARRAY, word, tuple(t.text for t in tokens_of(inside) if t.kind == "word"))
                at = end
            else:
                yield Token("word", word)


def _after_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _is_name(text: str) -> bool:
    return text.isidentifier()


def _word(text: str, at: int) -> tuple[str, int]:
    start = at
    while at < len(text):
        sign = text[at]
        if sign == "\\":
            at += 2
        elif sign in "\"'`":
            at = matching(text, at)
        elif sign == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = matching(text, at + 1)
        elif sign in " \t\n;&|()<>":
            break
        else:
            at += 1
    return text[start:at], at


def _body(text: str, at: int, end: str) -> tuple[str, int]:
    """A here-document from `at` to the line that is `end`."""
    lines: list[str] = []
    while at < len(text):
        stop = text.find("\n", at)
        stop = len(text) if stop < 0 else stop
        line, at = text[at:stop], stop + 1
        if line.strip() == end:
            return "\n".join(lines), stop
        lines.append(line)
    return "\n".join(lines), len(text)
