"""Whether a command starts a Python that takes no notice of `shim run`: without its environment, or without site."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

__all__ = ["deaf_part"]

# Of Python's options (Python/getopt.c, the same from 3.10 to 3.14). -I and -E leave PYTHONPATH out, and -S does not
# import sitecustomize. -s and -P leave both alone.
_DEAF = "IES"
_ENDS = "cm"  # the rest belongs to the program
_WITH_VALUE = "WX"  # the value is the rest of the argument, or else the next argument
_LONG_WITH_VALUE = "--check-hash-based-pycs"  # the value is the next argument; Python knows no --option=value

# Commands that run another command. Their options need not be known: the first argument that names a Python begins
# the other command.
_WRAPPERS = frozenset(
    ("chrt", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time", "timeout", "xvfb-run")
)
_DEPTH = 8  # of commands in commands


def deaf_part(command: Sequence[str], depth: int = _DEPTH) -> str:
    """The part of `command` that keeps its Python from applying shim, such as ``-I``. "" if none is seen.

    Follows `env`, with -S, a few wrappers such as `timeout`, and the first line of a script.
    """
    if not command or not depth:
        return ""
    name, rest = os.path.basename(command[0]), list(command[1:])
    if _is_python(name):
        return _in_options(rest)
    if name == "env":
        return _in_env(rest, depth)
    if name in _WRAPPERS:
        starts = (place for place, word in enumerate(rest) if _is_python(os.path.basename(word)) or word == "env")
        return deaf_part(rest[next(starts, len(rest)) :], depth - 1)
    return deaf_part(_interpreter_of(command[0]), depth - 1)


def _is_python(name: str) -> bool:
    return name.startswith(("python", "pypy"))


def _in_options(arguments: Sequence[str]) -> str:
    """The first option of Python that makes it deaf, with the letters beside it."""
    left = iter(arguments)
    for argument in left:
        if argument == _LONG_WITH_VALUE:
            next(left, None)
            continue
        if not argument.startswith("-") or argument.startswith("--") or argument == "-":
            return ""
        for place, letter in enumerate(argument[1:], 2):
            if letter in _DEAF:
                return argument
            if letter in _ENDS:
                return ""
            if letter in _WITH_VALUE:
                if place == len(argument):
                    next(left, None)
                break
    return ""


def _in_env(arguments: list[str], depth: int) -> str:
    """The same for the arguments of `env`, which may also take the environment away."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word in ("-i", "-", "--ignore-environment"):
            return f"env {word}"
        if word.startswith("--unset="):
            if word == "--unset=PYTHONPATH":
                return f"env {word}"
        elif word in ("-u", "--unset", "-C", "--chdir"):
            value = left.pop(0) if left else ""
            if value == "PYTHONPATH" and word in ("-u", "--unset"):
                return f"env {word} {value}"
        elif word == "-uPYTHONPATH":
            return f"env {word}"
        elif word in ("-S", "--split-string"):
            left = [*_split(left.pop(0) if left else ""), *left]
        elif word.startswith("--split-string="):
            left = [*_split(word.partition("=")[2]), *left]
        elif word.startswith("-") and not word.startswith("--") and "S" in word:  # -vS, or -S with its value beside it
            flags, _, value = word[1:].partition("S")
            left = [*_split(value or (left.pop(0) if left else "")), *left]
            if "i" in flags:
                return f"env -{flags}S"
        elif word.startswith("PYTHONPATH="):
            return f"env {word}"
        elif word == "--":
            continue
        elif not word.startswith("-") and "=" not in word:
            return deaf_part([word, *left], depth - 1)
    return ""


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quotation without its end, which env refuses
        return []


def _interpreter_of(program: str) -> list[str]:
    """The command in the first line of a script: the interpreter, and all that follows it as one argument."""
    path = shutil.which(program)
    if path is None or not os.path.isfile(path):
        return []
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    return os.fsdecode(line[2:]).strip().split(None, 1)
