"""The context that callers enter: which configs of a model it means, and what it promises."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shim._config_override.recompute import Wanted, claimed, refuse_what_is_not_carried
from shim._config_override.values import Held, held, same
from shim._errors import OptionError

__all__ = ["config_override"]

logger = logging.getLogger("shim")
_said: set[str] = set()  # so that a warning of every step is one


@contextmanager
def config_override(config: Any, **fields: Any) -> Iterator[None]:
    """`config` with other values for `fields` while the context is entered, and in every recompute of what ran in it.

        with shim.config_override(model, apply_rope_fusion=False):
            output = model(...)
        output.sum().backward()      # layers are recomputed with apply_rope_fusion=False

    config: a config, a model, or a list of a model's chunks. Given a model, its config and the copies that its modules
        hold (shared experts have one, and a sequential expert layer under padding, core attention, output layers) get
        the values. A copy in which a field differs from the model's config keeps it, because upstream or the trainer
        made it differ; a WARNING says which. Given a config, that object alone: modules with a copy do not follow.
    fields: their values. What a module took out of its config when it was built is out of reach.

    The fields are written, because layers hold on to the config they were built with: all layers and all threads that
    read this object see the values. What is assigned to a field inside of the context holds from then on, and until it
    is left; leaving restores what was there on entry, under exceptions too. Contexts nest, in one thread with any
    values. What cannot be written leaves nothing written; what cannot be restored raises, and leaves no more behind
    than that value.

    A recompute sees what its forward pass saw: the values that overridden fields had when the checkpoint was entered,
    and fields as they were before all overrides where none was entered then. Afterwards the config holds again what it
    held before the recompute. Lists, dicts and sets are copied for it; OptionError in backward where another object
    was changed in place since. That holds for the checkpoints of megatron-core and Transformer Engine with the patches
    config-override and te-config-override applied, and for torch.utils.checkpoint. NotMetError where one of these
    libraries is loaded and would not carry the values: the recompute would silently run with others. A checkpoint of
    anybody else's does not see them; enter the context inside of the function that it runs. The same goes for
    torch.compile: outside of a compiled function the context works as ever.

    Threads and tasks of asyncio may ask for one value at one time, and backward may run on threads of autograd.
    OptionError, on entry or in backward, where two threads need different values: overrides, recomputes of what ran
    under one, and recomputes that another thread is in the middle of; and on entry where two tasks do, or a task beside
    others within an override around them all. A recompute needs a config that its function can reach (by attributes,
    items, closures, and globals that are named), so that threads with a config of their own do not meet. A thread or
    task that runs without either, on a config that others override or recompute with, sees their values; a generator
    that is suspended inside of the context keeps it entered.

    OptionError where `config` has no such field, and for a model without a config.
    """
    wanted = _wanted(config, fields)
    refuse_what_is_not_carried()
    with claimed(lambda: wanted, may_suspend=True):
        yield


def _wanted(target: Any, fields: dict[str, Any]) -> list[Wanted]:
    wanted: dict[tuple[int, str], Wanted] = {}
    for config, copies in _configs(target):
        for name, value in fields.items():
            if not hasattr(config, name):
                raise OptionError(
                    f"config_override: {type(config).__name__} has no field {name!r}. Remedy: correct the name, or "
                    "leave the field out where the installed release does not have it."
                )
            wanted[id(config), name] = Wanted(config, name, Held(value, True))
            for where, other in copies.items():
                if same(held(other, name).value, held(config, name).value):
                    wanted[id(other), name] = Wanted(other, name, Held(value, True))
                else:
                    _say_that_it_keeps(where, name, held(other, name).value)
    return list(wanted.values())


def _configs(target: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The config that is meant, for a model one of each chunk, and by place the other configs that its modules hold."""
    torch = sys.modules.get("torch")
    chunks = target if isinstance(target, (list, tuple)) else [target]
    if torch is None or not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        yield target, {}
        return
    for chunk in chunks:
        config = _config_of(chunk)
        copies: dict[int, tuple[str, Any]] = {}
        for path, module in chunk.named_modules():
            for value in _held_by(module):
                if value is not config and _of_its_kind(value, config):
                    copies.setdefault(id(value), (path, value))
        yield config, dict(copies.values())


def _config_of(model: Any) -> Any:
    """That of the model, which a wrapper (DDP, mixed precision) may not have."""
    inner = model
    while inner is not None:
        if getattr(inner, "config", None) is not None:
            return inner.config
        inner = vars(inner).get("_modules", {}).get("module")
    raise OptionError(
        f"config_override: {type(model).__name__} has no config of its own. Remedy: give the config, or the module "
        "inside that has one."
    )


def _held_by(module: Any) -> Iterator[Any]:
    """What a module holds, and the configs of what it holds and is no module (token dispatchers)."""
    for value in vars(module).values():
        yield value
        config = getattr(value, "__dict__", {}).get("config") if not isinstance(value, type) else None
        if config is not None:
            yield config


def _of_its_kind(value: Any, config: Any) -> bool:
    """Whether both are configs of one family, as the config of a heterogeneous model and those of its layers are."""
    return any(kind is not object and kind in type(config).__mro__ for kind in type(value).__mro__)


def _say_that_it_keeps(where: str, name: str, value: Any) -> None:
    text = (
        f"config_override: {where} has a config of its own in which {name!r} is {value!r}, and keeps it. Remedy: "
        "override that config too, if it is to follow."
    )
    if text not in _said:
        _said.add(text)
        logger.warning(text)
