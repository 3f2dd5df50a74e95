"""The context manager: which configs of a model it covers, and what it guarantees."""

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
_said: set[str] = set()  # warnings logged so far, so that each is logged once


@contextmanager
def config_override(config: Any, **fields: Any) -> Iterator[None]:
    """Give `fields` of `config` other values inside the context, and in every recompute of calls made inside it.

        with shim.config_override(model, apply_rope_fusion=False):
            output = model(...)
        output.sum().backward()      # layers are recomputed with apply_rope_fusion=False

    config: a config, a model, or a list of a model's chunks. For a model, the values go to its config and to the copies
        that its modules hold (shared experts, a sequential expert layer under padding, core attention and output layers
        have one). If a field of a copy differs from the model's config, upstream or the trainer made it differ: the
        copy keeps the field, and a WARNING names it. For a config, only that object changes; copies in modules do not.
    fields: the new values. A value that a module read from its config when it was built is out of reach.

    The context writes the fields, because layers keep the config they were built with. All layers and all threads that
    read the config see the values. An assignment to a field inside the context holds until the context ends. The end
    restores the values from the entry, also after an exception. Contexts nest, in one thread with any values. If a
    field cannot be written, no field changes. If a field cannot be restored, the end raises, and only that field keeps
    its value.

    A recompute sees the values of its forward pass: overridden fields have the values they had when the checkpoint was
    entered, and fields without an override then have the values from before all overrides. Afterwards the config holds
    its earlier values again. Lists, dicts and sets are copied. If another object was changed in place since, backward
    raises OptionError. All this holds for torch.utils.checkpoint, and for the checkpoints of megatron-core and
    Transformer Engine with the patches config-override and te-config-override applied. If one of these libraries is
    loaded and would not carry the values, the entry raises NotMetError, because the recompute would silently run with
    others. Other checkpoints do not see the values: enter the context inside the function that they run. The same goes
    for torch.compile; outside of a compiled function the context works as usual.

    Threads and tasks of asyncio may ask for the same value at once, and backward may run on threads of autograd. If two
    threads need different values, the entry or backward raises OptionError. A thread needs a value through an
    override, through the recompute of a call made under one, or through a recompute under way. The entry also raises
    OptionError if two tasks need different values, or if one task differs from others inside an override around them
    all. A recompute needs only configs that its function can reach (by attributes, items, closures and named globals),
    so threads with separate configs never conflict. A thread or task without an override or recompute sees the values
    of others on a shared config. A generator that is suspended inside the context keeps the context entered.

    Raises OptionError if `config` lacks a field, and for a model without a config.
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
                    "leave the field out if the installed release does not have it."
                )
            wanted[id(config), name] = Wanted(config, name, Held(value, True))
            for where, other in copies.items():
                if same(held(other, name).value, held(config, name).value):
                    wanted[id(other), name] = Wanted(other, name, Held(value, True))
                else:
                    _say_that_it_keeps(where, name, held(other, name).value)
    return list(wanted.values())


def _configs(target: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each config to override (a model has one per chunk), with other configs that the modules hold: path -> config."""
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
    """The config of the model, or of the module inside a wrapper without one (DDP, mixed precision)."""
    inner = model
    while inner is not None:
        if getattr(inner, "config", None) is not None:
            return inner.config
        inner = vars(inner).get("_modules", {}).get("module")
    raise OptionError(
        f"config_override: {type(model).__name__} has no config. Remedy: give the config, or the module "
        "inside that has one."
    )


def _held_by(module: Any) -> Iterator[Any]:
    """The attributes of a module, and the configs of those attributes that are no modules (token dispatchers)."""
    for value in vars(module).values():
        yield value
        config = getattr(value, "__dict__", {}).get("config") if not isinstance(value, type) else None
        if config is not None:
            yield config


def _of_its_kind(value: Any, config: Any) -> bool:
    """Whether both configs share a base class, as the config of a heterogeneous model and those of its layers do."""
    return any(kind is not object and kind in type(config).__mro__ for kind in type(value).__mro__)


def _say_that_it_keeps(where: str, name: str, value: Any) -> None:
    text = (
        f"config_override: {where} has another config, in which {name!r} stays {value!r}. Remedy: "
        "also override that config, if it is to have the same value."
    )
    if text not in _said:
        _said.add(text)
        logger.warning(text)
