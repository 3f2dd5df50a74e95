"""A shell script: its variables, arrays, conditions and sourced files, and the commands that it runs.

What a condition decides that is not known here is not known: a word of such a branch begins with MAYBE.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from shim._configs.files import Search
from shim._configs.model_arguments import PRINTS_THEM, arguments_of
from shim._configs.shell_words import ARRAY, HERE, HERE_QUOTED, MAYBE, NOT_SAID, Token, matching, tokens_of

__all__ = ["Command", "Script"]

NESTED = 8  # scripts within words of scripts, or scripts that run others

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9@*#?!$-])(.*)", re.DOTALL)
_FLAGS_WITHIN = re.compile(r"(?:^|\s)--[A-Za-z]|(?:^|\s)\S*\w\.\w+=\S")
# Stages of a pipe that only make one line of several.
_ONE_LINE = re.compile(r"\|\s*(?:tr\s+(?:-s\s+)?'\\n'\s+' '|xargs|sed\s+'s/\s*(?:\\\+|\*)?/ /g')\s*(?=\||$)")
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_HEADS = ("then", "do", "else", "{", "!", "time", "}", "fi", "done", "esac")
_PREFIXES = ("eval", "exec", "nohup", "sudo", "command")  # words before a command that they run
_SHELLS = ("bash", "sh", "zsh")
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Command:
    """The expanded words of a command, and whether it is known to run."""

    words: tuple[str, ...]
    maybe: bool = False


@dataclass
class _Branch:
    """An `if` or `case` that is being read. holds: whether its present part runs; None if that is not known."""

    subject: str | None  # of a case
    holds: bool | None = True
    earlier: bool | None = False  # whether an earlier part has run


@dataclass
class Script:
    """Reads scripts, one after the other, with common variables."""

    search: Search
    file: Path
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    branches: list[_Branch] = field(default_factory=list)
    depth: int = 0
    short: int = 0  # how many branches there are behind a test with && or ||, whose branch is one command long

    def read(self, text: str) -> None:
        statement: list[Token] = []
        for token in tokens_of(text):
            if token.kind == "op" and token.text in ("\n", ";", "&", "&&", "||", "|", ";;", ";&", ";;&", "(", ")"):
                statement = self._end(statement, token.text)
            else:
                statement.append(token)
        self._end(statement, "\n")

    # Control flow

    def _now(self) -> bool | None:
        """Whether what is read now runs."""
        states = [branch.holds for branch in self.branches]
        return False if False in states else None if None in states else True

    def _end(self, statement: list[Token], by: str) -> list[Token]:
        while statement and statement[0].kind == "word" and statement[0].text in _HEADS:
            head = statement.pop(0).text
            if head == "else" and self.branches:
                branch = self.branches[-1]
                branch.holds = {True: False, False: True, None: None}[branch.earlier]
            elif head in ("fi", "esac") and self.branches:
                self.branches.pop()
        words = [token.text for token in statement if token.kind == "word"]
        if self.branches and self.branches[-1].subject is not None and by == ")" and statement:
            self._pattern(words)  # a pattern of a case
            return []
        if self.branches and self.branches[-1].subject is not None and by == "|" and not self._in_part():
            return statement  # patterns with | between
        if by in (";;", ";&", ";;&"):
            self._simple(statement)
            if self.branches:
                self.branches[-1].holds = False
            return []
        if words[:1] == ["case"]:
            subject = self._one(words[1]) if len(words) > 1 else NOT_SAID
            self.branches.append(_Branch(subject, False))
            return statement[3:] if len(words) > 2 else []
        if words[:1] in (["if"], ["elif"]):
            self._condition(words[0], statement[1:])
            return []
        if words[:1] in (["for"], ["while"], ["until"], ["select"]):
            self._loop(words)
            return []
        if by in ("&&", "||") and self._is_test(words):
            holds = self._tested(words)
            self.branches.append(_Branch(None, holds if by == "&&" or holds is None else not holds))
            self.short = len(self.branches)
            return []
        self._simple(statement)
        if self.short and self.short == len(self.branches):
            self.branches.pop()
            self.short = 0
        return []

    def _in_part(self) -> bool:
        return self.branches[-1].holds is not False

    def _pattern(self, words: list[str]) -> None:
        branch = self.branches[-1]
        subject = branch.subject or ""
        if branch.earlier is True:
            branch.holds = False
        elif NOT_SAID in subject:
            branch.holds = branch.earlier = None
        else:
            patterns = [self._one(part) for word in words for part in word.split("|")]
            hit = any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)
            branch.holds = branch.earlier = hit or branch.earlier

    def _condition(self, word: str, statement: list[Token]) -> None:
        words = [token.text for token in statement if token.kind == "word"]
        if word == "if":
            # `-z "$TP"` asks whether the environment gives it. As with ${TP:-4}, what the script itself says counts.
            self.branches.append(_Branch(None))
            branch = self.branches[-1]
            branch.holds = branch.earlier = self._tested(words)
            return
        branch = self.branches[-1] if self.branches else _Branch(None)
        holds = self._tested(words)
        if branch.earlier is True:
            branch.holds = False
        else:
            branch.holds = None if branch.earlier is None and holds is not False else holds
            branch.earlier = True if branch.holds else None if None in (branch.holds, branch.earlier) else False

    @staticmethod
    def _is_test(words: list[str]) -> bool:
        return (bool(words) and words[0] in ("[", "[[", "test")) or (bool(words) and words[0].startswith("(("))

    def _tested(self, words: list[str]) -> bool | None:
        """Whether a condition holds; None if that is not known."""
        negated = words[:1] == ["!"]
        words = words[1:] if negated else words
        if words in (["true"], ["false"]):
            return (words == ["true"]) != negated
        if not words or words[0] not in ("[", "[[", "test"):
            return None
        parts = [word for word in words[1:] if word not in ("]", "]]")]
        if parts[:1] == ["!"]:
            negated, parts = not negated, parts[1:]
        values = [self._one(part) for part in parts]
        found = self._compared(parts, values)
        return None if found is None else found != negated

    def _compared(self, parts: list[str], values: list[str]) -> bool | None:
        if len(parts) == 2 and parts[0] in ("-z", "-n"):
            empty = values[1].replace(NOT_SAID, "") == "" and (NOT_SAID not in values[1] or "$" in parts[1])
            unset = re.fullmatch(r"\"?\$(?:\{?(\w+)(?::?-)?\}?)\"?", parts[1])
            if NOT_SAID in values[1] and not (unset and unset[1] not in self.variables and not unset[1].isdigit()):
                return None
            return empty == (parts[0] == "-z")
        if len(parts) != 3 or any(NOT_SAID in value for value in values):
            return None
        left, sign, right = values[0], parts[1], values[2]
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        numbers = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge}
        numbers |= {"-lt": operator.lt, "-le": operator.le}
        if sign in numbers and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
            return bool(numbers[sign](int(left), int(right)))
        return None

    def _loop(self, words: list[str]) -> None:
        if words[0] == "for" and len(words) > 1:
            given = self._expanded(words[3:]) if words[2:3] == ["in"] else []
            self._set(words[1], tuple(given) if len(given) == 1 else (NOT_SAID,), False)

    # Simple commands

    def _simple(self, statement: list[Token]) -> None:
        now = self._now()
        if now is False or not statement:
            return
        bodies = [token for token in statement if token.kind in (HERE, HERE_QUOTED)]
        for sign, token in pairwise(statement):
            if sign.kind == "op" and sign.text == "<<<" and token.kind == "word":
                bodies.append(Token(HERE_QUOTED, self._one(token.text)))
        statement = _without_redirections(statement)
        declaring = False
        while statement:
            token = statement[0]
            given = _ASSIGNMENT.fullmatch(token.text)
            if token.kind == ARRAY:
                values = tuple(self._expanded(token.words))
                self._set(token.text.rstrip("+="), values, token.text.endswith("+="), array=True)
            elif token.kind == "word" and given:
                self._set(given[1], self._value(given[3]), bool(given[2]))
            elif token.kind == "word" and token.text in _DECLARING:
                declaring = True
            elif not (declaring and token.kind == "word"):
                break
            statement = statement[1:]
        raw = [token.text for token in statement if token.kind == "word"]
        if raw:
            self._run(raw, bodies, now is None)

    def _run(self, raw: list[str], bodies: list[Token], maybe: bool) -> None:
        name = raw[0]
        if name in ("source", "."):
            self._source(raw, maybe)
        elif name in ("function", "unset", "set", "shift", "return", "exit", "echo", "printf", "read", "cd", "mkdir"):
            self._forget(raw, bodies)
        elif name != ":":
            words = self._expanded(raw)
            while words and words[0] in _PREFIXES:
                words = words[1:]
            inner = [word for word in words if _is_script(word)]
            if len(words) > 1 and words[0].rpartition("/")[2] in _SHELLS and not words[1].startswith("-"):
                self._other(words[1], maybe)
            elif inner and self.depth < NESTED:
                self._nested("\n".join(inner), maybe)
            elif words:
                if words[0].endswith(".sh"):
                    self._other(words[0], maybe)
                self.commands.append(Command(tuple(words), maybe))  # a script's arguments are settings, too
            if words and words[0].rpartition("/")[2] in (*_SHELLS, "srun", "ssh"):
                for body in bodies:
                    self._nested(body.text, maybe)
        else:
            self._expanded(raw)  # : ${TP:=2}

    def _nested(self, text: str, maybe: bool) -> None:
        inner = Script(self.search, self.file, self.commands, self.variables, self.used, depth=self.depth + 1)
        if maybe:
            inner.branches.append(_Branch(None, None))
        if inner.depth < NESTED:
            inner.read(text)

    def _forget(self, raw: list[str], bodies: list[Token]) -> None:
        """Variables that get what only a run of the script would tell."""
        if raw[0] == "read":
            parts = any(re.fullmatch(r"-\w*a", word) for word in raw)  # into an array
            for name in raw[1:]:
                if name.isidentifier():
                    body = self._body(bodies[0]) if bodies else (NOT_SAID,)
                    self._set(name, tuple(body[0].split()) if parts else body, False)
        if raw[0] == "printf" and "-v" in raw[:-1]:
            self._set(raw[raw.index("-v") + 1], (NOT_SAID,), False)

    def _body(self, token: Token) -> tuple[str, ...]:
        return (token.text,) if token.kind == HERE_QUOTED else ("".join(self._within(token.text)),)

    def _source(self, raw: list[str], maybe: bool) -> None:
        words = self._expanded(raw[1:2])
        name = words[0] if words else NOT_SAID
        file = None if NOT_SAID in name else self.search.find(name, self.file.parent)
        if file is None or not file.is_file():
            self.search.miss(str(self.file), raw[1].strip("\"'") if len(raw) > 1 else "source")
            return
        self._file(file, maybe, f"{self.file}, source {raw[1]}")

    def _other(self, name: str, maybe: bool) -> None:
        """Another script that this one runs. If it is not at hand, it may be any tool: it is not missed."""
        file = None if NOT_SAID in name else self.search.find(name.lstrip(MAYBE), self.file.parent)
        if file is None or not file.is_file():
            self.search.others.append(name.lstrip(MAYBE).replace(NOT_SAID, "..."))
        elif file.suffix == ".sh" and self.depth < NESTED and file.resolve() not in self.search.open_files:
            self._file(file, maybe, f"{self.file}, bash {name}")

    def _file(self, file: Path, maybe: bool, by: str) -> None:
        self.search.enter(file, by)
        inner = Script(self.search, file, self.commands, self.variables, self.used, depth=self.depth + 1)
        if maybe:
            inner.branches.append(_Branch(None, None))
        inner.read(self.search.text_of(file))
        self.search.leave()

    # Variables

    def _set(self, name: str, values: tuple[str, ...], more: bool, array: bool = False) -> None:
        now = self._now()
        if now is False:
            return
        had = self.variables.get(name)
        if more and had is not None:
            extra = values if now else tuple(_maybe(value) for value in values)
            joined = (*had, *extra) if array or len(had) != 1 else ("".join((had[0], *extra)),)
            self.variables[name] = joined
        elif now is None and had != values:
            self.variables[name] = _either(had or (), values)
        else:
            self.variables[name] = values

    def _value(self, raw: str) -> tuple[str, ...]:
        return (" ".join(self._expanded([raw], split=False)),)

    def _one(self, raw: str) -> str:
        return " ".join(self._expanded([raw], split=False))

    def _expanded(self, raw: Iterable[str], split: bool = True) -> list[str]:
        found: list[str] = []
        for word in raw:
            found += self._word(word, split)
        return found

    def _word(self, word: str, split: bool) -> list[str]:
        """A raw word as the words that it stands for."""
        parts, text, at, quoted = [], "", 0, False
        while at < len(word):
            sign = word[at]
            if sign == "\\" and at + 1 < len(word):
                text, at = text + word[at + 1], at + 2
            elif sign == "'":
                end = matching(word, at)
                text, at, quoted = text + word[at + 1 : end - 1], end, True
            elif sign == '"':
                end = matching(word, at)
                inside = word[at + 1 : end - 1]
                if re.fullmatch(r"\$\{\w+\[[@*]\]\}", inside) and not text:
                    parts += self._parameter(inside[2:-1])
                else:
                    text += "".join(self._within(inside))
                at, quoted = end, True
            elif sign == "$":
                values, at = self._dollar(word, at)
                if not split:
                    text += " ".join(values)
                    continue
                pieces = [piece for value in values for piece in (value.split() or [""])]
                if len(pieces) > 1:
                    parts, text = [*parts, text + pieces[0], *pieces[1:-1]], pieces[-1]
                else:
                    text += "".join(pieces)
            elif sign == "`":
                end = matching(word, at)
                text, at = text + self._substituted(word[at + 1 : end - 1]), end
            else:
                text, at = text + sign, at + 1
        if text or (quoted and not parts) or (not split and not parts):
            parts.append(text)
        return [_one_mark(part) for part in parts]

    def _within(self, inside: str) -> Iterable[str]:
        at = 0
        while at < len(inside):
            if inside[at] == "\\" and at + 1 < len(inside):
                yield inside[at + 1]
                at += 2
            elif inside[at] == "$":
                values, at = self._dollar(inside, at)
                yield " ".join(values)
            elif inside[at] == "`":
                end = matching(inside, at)
                yield self._substituted(inside[at + 1 : end - 1])
                at = end
            else:
                yield inside[at]
                at += 1

    def _dollar(self, text: str, at: int) -> tuple[list[str], int]:
        """What begins with `$` at this place, and the place behind it."""
        after = text[at + 1 : at + 2]
        if text.startswith("$((", at):
            end = matching(text, at + 1)
            return [self._arithmetic(text[at + 3 : end - 2])], end
        if after == "(":
            end = matching(text, at + 1)
            return [self._substituted(text[at + 2 : end - 1])], end
        if after == "{":
            end = matching(text, at + 1)
            return self._parameter(text[at + 2 : end - 1]), end
        found = re.match(r"[A-Za-z_]\w*|[0-9@*#?!$-]", text[at + 1 :])
        if found is None:
            return ["$"], at + 1
        return self._parameter(found[0]), at + 1 + found.end()

    def _parameter(self, text: str) -> list[str]:
        """`${...}`, without its braces."""
        given = _PARAMETER.fullmatch(text)
        if given is None:
            return [NOT_SAID]
        name, rest = given[1], given[2]
        self.used.add(name)
        if name == "0" or name == "BASH_SOURCE":
            place = str(self.file.resolve())
            return [str(self.file.resolve().parent)] if rest.endswith("%/*") else [place]
        had = self.variables.get(name)
        known = had is not None
        for sign in (":-", "-", ":=", "="):
            if rest.startswith(sign):
                default = self._value(rest[len(sign) :])
                values = had if had is not None and (had != ("",) or not sign.startswith(":")) else default
                if sign.endswith("="):
                    self.variables[name] = values
                return list(values)
        if rest.startswith((":+", "+")):
            return list(self._value(rest.lstrip(":+"))) if known and had != ("",) else []
        if rest.startswith(("[@]", "[*]")):
            return list(had or ()) if known or name not in "@*" else [NOT_SAID]
        if had is None and name == "PWD":
            return ["."]
        if had is None:
            return [] if name in "@*" else [NOT_SAID]
        if rest in ("", "[0]"):
            return list(had[:1]) if rest == "" and len(had) > 1 and not self._is_uncertain(had) else list(had)
        if rest == "%/*":
            return [had[0].rpartition("/")[0]]
        if rest == "##*/":
            return [had[0].rpartition("/")[2]]
        return list(had) if rest.startswith((":?", "?")) else [NOT_SAID]

    @staticmethod
    def _is_uncertain(values: tuple[str, ...]) -> bool:
        return any(value.startswith(MAYBE) for value in values)

    def _arithmetic(self, text: str) -> str:
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda use: " ".join(self._parameter(use[1])), text)
        try:
            return str(_number(ast.parse(plain.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return NOT_SAID

    def _substituted(self, text: str) -> str:
        """`$( ... )`, if it names a folder by that of the script, or prints a word."""
        text = re.sub(r"(\d|&)?>\s*(/dev/null|&\d)", "", text)
        text = _ONE_LINE.sub("", text)
        parts = [part.strip() for part in re.split(r"&&|;", text) if part.strip()]
        first = [token.text for token in tokens_of(parts[0]) if token.kind == "word"] if parts else []
        words = [word for word in self._expanded(first) if word not in ("--", "-P", "-f", "-e")]
        name, last = (words or [""])[0], (words or [""])[-1]
        if any(word.endswith(PRINTS_THEM) for word in words):
            return arguments_of(last, self.search, self.file)
        if words == ["pwd"]:
            return "."  # where it is started: such names are looked for from here upwards
        if len(words) < 2 or "|" in text or (NOT_SAID in last and name != "echo"):
            return NOT_SAID
        if name == "cd" and parts[-1].split()[0] == "pwd":
            return str((self.file.resolve().parent / last).resolve())
        if len(parts) > 1:
            return NOT_SAID
        if name == "dirname":
            return str(Path(last).parent)
        if name == "basename":
            return Path(last).name
        if name in ("realpath", "readlink"):
            return str((self.file.resolve().parent / last).resolve())
        return " ".join(words[1:]) if name == "echo" else NOT_SAID


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))


def _is_script(word: str) -> bool:
    """Whether one word holds a command with its arguments, as that of `bash -c`."""
    text = word.lstrip(MAYBE).strip()
    return " " in text and text[:1] not in ("{", "[") and _FLAGS_WITHIN.search(text) is not None and "python" in text


def _maybe(word: str) -> str:
    return word if word.startswith(MAYBE) else MAYBE + word


def _one_mark(word: str) -> str:
    """The word, with NOT_SAID for an uncertain part within it."""
    return re.sub(rf"(?<=\S){MAYBE}", NOT_SAID, word)


def _either(had: tuple[str, ...], values: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a variable that has one value or the other."""
    with_flags = any("-" in value[:2] or " --" in value for value in (*had, *values))
    if not with_flags:
        return (NOT_SAID,)
    return tuple(_maybe(word) for value in (*had, *values) for word in value.split())


def _without_redirections(statement: list[Token]) -> list[Token]:
    found: list[Token] = []
    skip = False
    for token in statement:
        if skip:
            skip = False
        elif token.kind == "op":
            skip = True
        elif token.kind not in (HERE, HERE_QUOTED):
            found.append(token)
    return found
