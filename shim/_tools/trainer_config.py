"""`shim plan --config FILE`: what a trainer's own arguments say of a run.

A YAML or JSON file (ms-swift, verl, NeMo-RL), or a script or file of arguments: megatron's `--flags`, Hydra's `a.b=c`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shim._errors import OptionError
from shim._planning.relevance import SIZES, Run, facts_from, given_facts, setting_names, words_of

__all__ = ["run_of_config"]

# Sections of engines that generate, whose parallel sizes are not those of training.
_NOT_TRAINED = ("rollout", "generation", "vllm", "vllm_cfg", "vllm_kwargs", "sglang", "inference", "inference_engine")
_NEGATED = {"no_rope_fusion": "apply_rope_fusion"}  # arguments that switch a setting off
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w.-]*)(?:(?:=|[ \t]+)(\"[^\"\n]*\"|'[^'\n]*'|(?!-)[^\s\\]+))?")
_HYDRA = re.compile(r"(?<!\S)\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s\\]+)")
_VARIABLE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&]*)", re.MULTILINE)
_USE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)

MISSPELT = 0.9  # how like a known name another one is, by difflib, if one or two of its letters are wrong
NAMED = 20  # settings that a note lists

UNRESOLVED = object()  # the value of a setting that refers to something else than the file
Setting = tuple[tuple[str, ...], Any]  # the path of its keys, and its value


def run_of_config(path: str, te_is_installed: bool) -> Run:
    """What the file says. Settings that say nothing of the patches are ignored; notes count and name them.

    Raises OptionError if the file cannot be read, or has no settings.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path} cannot be read: {error}") from None
    settings = list(_settings(text))
    if not settings:
        raise OptionError(f"--config {path} has no settings: neither a YAML mapping, nor --flags, nor a.b=c")
    trained = [(keys, value) for keys, value in settings if not set(keys[:-1]) & set(_NOT_TRAINED)]
    of_name: dict[str, list[Any]] = {}
    open_names: set[str] = set()
    for keys, value in trained:
        for name in (keys[-1], ".".join(keys[-2:])):
            if value is UNRESOLVED:
                open_names.add(name)
            else:
                of_name.setdefault(name, []).append(value)
    facts = facts_from(lambda name: of_name.get(name, ()))
    # A variable may hold what makes a word true, and never what makes it false.
    unresolved = words_of(open_names)
    facts = {word: holds for word, holds in facts.items() if holds or word not in unresolved}
    silent = [word for word in SIZES if word not in facts and word not in unresolved]
    facts.update(dict.fromkeys(silent, False))
    if facts.get("tp") is False:
        facts["sp"] = False
    if facts.get("ep") or any(_tells_of_experts(keys[-1], value) for keys, value in trained):
        facts["moe"] = True  # the number of experts may stand in the model's own config alone
    holding = [word for word, holds in facts.items() if holds]
    known = {*setting_names(), *(keys[-1] for keys, value in trained if _tells_of_experts(keys[-1], value))}
    said = sum(keys[-1] in known for keys, _ in trained)
    notes = [f"{said} of {len(settings)} settings in {path} say what is trained; the others are ignored"]
    if len(trained) < len(settings):
        notes.append(f"{len(settings) - len(trained)} of them belong to an engine that generates")
    notes += _of_ignored(dict.fromkeys(keys[-1] for keys, _ in trained if keys[-1] not in known))
    if unresolved:
        names = ", ".join(sorted(open_names & setting_names()))
        notes.append(f"not known, because their values are not in {path}: {names}")
    if silent:
        notes.append(f"{', '.join(silent)}: size 1, because {path} does not say otherwise")
    facts.update(given_facts(te_is_installed))
    return Run(facts, f"a run with {', '.join(holding) or 'none of the words of --for'}", tuple(notes))


def _of_ignored(names: Iterable[str]) -> Iterator[str]:
    """The notes on settings that are ignored: those that may be misspelt first."""
    import difflib  # here, because only --config needs it

    known = setting_names()
    close = {name: difflib.get_close_matches(name, known, 1, MISSPELT) for name in names}
    if any(close.values()):
        pairs = ", ".join(f"{name} ({found[0]}?)" for name, found in close.items() if found)
        yield f"ignored, and perhaps misspelt: {pairs}"
    if others := [name for name, found in close.items() if not found]:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        yield f"ignored: {', '.join(others[:NAMED])}{more}"


def _tells_of_experts(name: str, value: Any) -> bool:
    """Whether it is a setting of a mixture of experts that is on."""
    return name.startswith("moe_") and value is not UNRESOLVED and str(value).lower() not in ("", "false", "none", "0")


def _settings(text: str) -> Iterator[Setting]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        content = None
    if isinstance(content, Mapping):
        yield from _flattened(content, ())
    else:
        yield from _arguments(_COMMENT.sub("", text))


def _flattened(content: Mapping[Any, Any], above: tuple[str, ...]) -> Iterator[Setting]:
    for key, value in content.items():
        # Hydra's overrides may name several keys at once.
        keys = (*above, *(_name(part) for part in str(key).split(".")))
        if isinstance(value, Mapping):
            yield from _flattened({"enabled": False} if value.get("enabled") is False else value, keys)
        else:
            yield keys, UNRESOLVED if _is_unresolved(value) else value


def _arguments(text: str) -> Iterator[Setting]:
    variables: dict[str, str] = {}
    for name, value in _VARIABLE.findall(text):
        use = _USE.fullmatch(value := value.strip("\"'"))
        # TP=${TP:-4} takes the default, because the variable itself is not at hand.
        variables[name] = use[3] if use and name in use.groups() and use[3] is not None else value

    def value_of(use: re.Match[str]) -> str:
        default = use[3] if use[3] is not None else use[0]
        return str(variables.get(use[1] or use[2], default))

    def resolved(value: str) -> str:
        for _ in range(3):  # a variable may hold another one
            value = _USE.sub(value_of, value)
        return value.strip("\"'")

    for name, value in _FLAG.findall(text):
        key = _name(name)
        if key in _NEGATED:
            yield (_NEGATED[key],), False
        else:
            found = resolved(value) if value else True
            yield tuple(key.split(".")), UNRESOLVED if _is_unresolved(found) else found
    for name, value in _HYDRA.findall(text):
        found = resolved(value)
        yield tuple(_name(part) for part in name.split(".")), UNRESOLVED if _is_unresolved(found) else found


def _name(key: str) -> str:
    return key.lower().replace("-", "_")


def _is_unresolved(value: Any) -> bool:
    """Whether a value refers to another one that is not at hand: a variable of the shell, or Hydra's interpolation."""
    return isinstance(value, str) and "$" in value
