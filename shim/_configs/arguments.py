"""The settings that a command gives: --flags, Hydra's a.b=c, and files that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shim._configs.shell_words import MAYBE, NOT_SAID
from shim._configs.values import OPEN, Tree, key_of, put

__all__ = ["Given", "given_by", "is_trained"]

_OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_MODULE = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)+")
_PYTHONS = ("-m", "-u", "--")  # flags without a value, before the name of a program
_NUMBER = re.compile(r"-\d*\.?\d+(?:e-?\d+)?")
# Programs that serve, convert, prepare or evaluate, whose parallel sizes are not those of training.
_NOT_TRAINING = re.compile(
    r"rollout|deploy|serve|server|infer|inference|generate|eval|evaluate|export|convert\w*|conversion|preprocess\w*|"
    r"download|merge\w*|vllm|sglang|curl|rm|pkill|kill|sleep|cp|mv|cat|tar|docker|apptainer|pip|git|wget|start|stop"
)
_CONFIG_FLAGS = ("config", "config_file", "config_path", "yaml", "yaml_cfg", "config_yaml")


@dataclass
class Given:
    """What one command gives. files: those that it names. choices: Hydra's `group=option`."""

    program: str
    settings: Tree = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @property
    def config_name(self) -> object:
        return self.settings.get("config_name")


def is_trained(given: Given) -> bool:
    """Whether the program may train. Its words stand before its flags: megatron sft, python -m a.b."""
    words = re.split(r"[\s/._-]+", given.program.lower())
    return not any(_NOT_TRAINING.fullmatch(word) for word in words)


def given_by(words: Sequence[str]) -> Given:
    """What these words give, of which the first ones name the program."""
    found = Given(" ".join(_program(words)))
    flag: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        plain = word.lstrip(MAYBE)
        is_flag = _FLAG.fullmatch(plain) if not _NUMBER.fullmatch(plain) else None
        override = _OVERRIDE.fullmatch(plain)
        if flag is not None and (is_flag or override or plain == "--"):
            _set(found, flag, values)
            flag, values = None, []
        if plain in _PYTHONS:
            continue
        if override:
            _override(found, override[1], override[2], word.startswith(MAYBE))
        elif is_flag and is_flag[2] is not None:
            _set(found, word[: word.index("=")], [is_flag[2]])
        elif is_flag:
            flag = word
        elif flag is not None:
            values.append(word)
        elif plain.endswith((".yaml", ".yml")) and NOT_SAID not in plain:
            found.files.append(plain)
    return found


def _program(words: Sequence[str]) -> Iterator[str]:
    """The words that name a program: those before the first flag, scripts, and modules that are no flag's value."""
    at_first = True
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith(("-", MAYBE)):
            at_first = at_first and word in _PYTHONS
        elif "=" not in word:
            is_value = before.startswith("-") and "=" not in before and before not in _PYTHONS
            if at_first or (not is_value and (word.endswith(".py") or before == "-m" or _MODULE.fullmatch(word))):
                yield word


def _set(found: Given, flag: str, values: list[str]) -> None:
    name = _FLAG.fullmatch(flag.lstrip(MAYBE).split("=")[0])
    if name is None:
        return
    key = ".".join(key_of(part) for part in name[1].split("."))
    value = _value(values, flag.startswith(MAYBE) or any(item.startswith(MAYBE) for item in values[:1]))
    if key in _CONFIG_FLAGS and isinstance(value, str) and value.endswith((".yaml", ".yml", ".json")):
        found.files.append(value)
    put(found.settings, key, value)


def _value(values: list[str], maybe: bool) -> object:
    if maybe or any(NOT_SAID in item for item in values[:1]):
        return OPEN
    if not values:
        return True
    return values[0] if len(values) == 1 else [item for item in values if not item.startswith(MAYBE)]


def _override(found: Given, name: str, text: str, maybe: bool) -> None:
    value = OPEN if maybe or NOT_SAID in text else text.strip("\"'")
    if "/" in name or "@" in name or "." not in name:
        found.choices[name.lstrip("/")] = str(value) if value is not OPEN else "?"
    if "/" not in name and "@" not in name:
        put(found.settings, name, value)
