"""A field of a config with another value around a region, in the region's recompute too.

This module holds state of the process: which fields are overridden now. Activation recompute runs in backward, often on
another thread and after the override was left, so that neither the caller's frame nor a thread-local can say it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from shim._errors import NotMetError, OptionError

__all__ = ["carrying", "carrying_checkpoint", "config_override", "overridden"]

_MISSING = object()


class _Field:
    """One field of one config while it is overridden: what it held before, and the values since, innermost last."""

    def __init__(self, config: Any, name: str) -> None:
        self.config, self.name = config, name
        self.before = getattr(config, name)
        # Where the class holds it, as it does a default, the config gets rid of its own again; a property is set back.
        by_class = inspect.getattr_static(type(config), name, _MISSING)
        own = name in getattr(config, "__dict__", {})
        self.inherited = not own and by_class is not _MISSING and not hasattr(by_class, "__set__")
        self.values: list[_Value] = []

    @property
    def key(self) -> tuple[int, str]:
        return id(self.config), self.name

    def write(self) -> None:
        if not self.values and self.inherited:
            delattr(self.config, self.name)
        else:
            setattr(self.config, self.name, self.values[-1].value if self.values else self.before)


class _Value:
    """One value of a field; compared by identity, because several regions may ask for the same."""

    def __init__(self, value: Any, thread: int | None) -> None:
        self.value, self.thread = value, thread


class _Seen(NamedTuple):
    """A field, and the value that a region saw when it was entered."""

    config: Any
    name: str
    value: Any


_fields: dict[tuple[int, str], _Field] = {}
_lock = threading.RLock()


@contextmanager
def config_override(config: Any, **fields: Any) -> Iterator[None]:
    """`config` with other values for `fields` while the context is entered, and in every recompute of what ran in it.

        with shim.config_override(model.config, apply_rope_fusion=False):
            output = model(...)
        output.sum().backward()      # layers are recomputed with apply_rope_fusion=False

    The fields are written, because layers hold on to the config they were built with: all layers and all threads that
    read this object see the values until the context is left. Two threads may ask for the same value at one time;
    OptionError where they ask for different ones, and where `config` has no such field. Contexts nest, in one thread
    with any values, and restore what was there before, also under exceptions; what cannot be written leaves nothing
    written.

    A recompute sees what its forward pass saw: the values of the contexts that were entered then, and the field as it
    was before where it is overridden only now. That holds for the checkpoints of megatron-core and Transformer Engine
    with the patches config-override and te-config-override applied, and for torch.utils.checkpoint entered inside the
    context. NotMetError where one of these libraries is loaded and would not carry the values: the recompute would
    silently run with others. A checkpoint of anybody else's does not see them; enter the context inside of the function
    that it runs. The same goes for torch.compile: outside of a compiled function the context works as ever.
    """
    for name in fields:
        if not hasattr(config, name):
            raise OptionError(
                f"config_override: {type(config).__name__} has no field {name!r}. Remedy: correct the name, or "
                "leave the field out where the installed release does not have it."
            )
    _refuse_what_is_not_carried()
    with _entered(config, fields, threading.get_ident()):
        yield


@contextmanager
def _entered(config: Any, fields: Mapping[str, Any], thread: int | None) -> Iterator[None]:
    """`thread`: whose wish it is; None in a recompute, for which whoever called backward waits."""
    with ExitStack() as stack:
        with _lock:
            for name, value in fields.items():
                stack.callback(_remove, *_add(config, name, _Value(value, thread)))
        yield


def _add(config: Any, name: str, value: _Value) -> tuple[_Field, _Value]:
    field = _fields.get((id(config), name)) or _Field(config, name)
    for other in field.values:
        elsewhere = value.thread is not None and other.thread not in (None, value.thread)
        if elsewhere and other.value is not value.value and other.value != value.value:
            raise OptionError(
                f"config_override: another thread has set {name!r} of this {type(config).__name__} to {other.value!r}, "
                f"and this one wants {value.value!r}. Remedy: give each of them a config of its own."
            )
    field.values.append(value)
    try:
        field.write()
    except BaseException:
        field.values.remove(value)
        raise
    _fields[field.key] = field
    _carry_through_torch()
    return field, value


def _remove(field: _Field, value: _Value) -> None:
    with _lock:
        field.values.remove(value)
        field.write()
        if not field.values:
            del _fields[field.key]
            if not _fields:
                _torch_as_before()


# Recompute


def carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a checkpoint, which whenever it is called sees the values that overridden fields have now."""
    seen: tuple[_Seen, ...] = ()
    if _fields:
        with _lock:
            seen = tuple(_Seen(field.config, field.name, field.values[-1].value) for field in _fields.values())

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if not seen and not _fields:
            return function(*args, **kwargs)
        with _as_seen(seen):
            return function(*args, **kwargs)

    return run


@contextmanager
def _as_seen(seen: tuple[_Seen, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        with _lock:
            then = {(id(config), name) for config, name, _ in seen}
            since = [_Seen(f.config, f.name, f.before) for key, f in _fields.items() if key not in then]
            for config, name, value in (*seen, *since):
                stack.enter_context(_entered(config, {name: value}, None))
        yield


def overridden() -> bool:
    """Whether any field is, now."""
    return bool(_fields)


def carrying_checkpoint(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """`original`, whose argument number `position` is a function to run again in backward, which gets to see the values
    of its forward pass."""
    name = list(inspect.signature(original).parameters)[position]

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], carrying(args[position]), *args[position + 1 :])
        else:
            kwargs = {**kwargs, name: carrying(kwargs[name])}
        return original(*args, **kwargs)

    checkpoint._carries_config_overrides = True  # type: ignore[attr-defined]
    return checkpoint


class _Carrier(NamedTuple):
    """Where a loaded library runs a function again, and the patch that carries the values there."""

    module: str
    path: tuple[str, ...]
    patch: str


_CARRIERS = (
    _Carrier("megatron.core.tensor_parallel.random", ("CheckpointFunction", "forward"), "config-override"),
    _Carrier("megatron.core.tensor_parallel.random", ("CheckpointWithoutOutput", "checkpoint"), "config-override"),
    _Carrier("transformer_engine.pytorch.distributed", ("checkpoint",), "te-config-override"),
)


def _refuse_what_is_not_carried() -> None:
    for module, path, patch in _CARRIERS:
        found = sys.modules.get(module)
        if found is None:
            continue
        # functools.wraps hands the mark on to the wrappers of other patches.
        if not getattr(functools.reduce(getattr, path, found), "_carries_config_overrides", False):
            raise NotMetError(
                f"config_override: {module}:{'.'.join(path)} would recompute what runs in here with other values. "
                f"Remedy: apply the patch {patch} (shim.apply()), or give the layers a config of their own."
            )
    torch_checkpoint = sys.modules.get("torch.utils.checkpoint")
    if torch_checkpoint is not None and not hasattr(torch_checkpoint, GENERATOR):
        raise NotMetError(
            f"config_override: torch.utils.checkpoint of this torch has no {GENERATOR}, so that it would recompute "
            "what runs in here with other values. Remedy: give the layers a config of their own."
        )


# torch.utils.checkpoint has no release of ours to pin: its two ways in are replaced only while something is overridden.

GENERATOR = "_checkpoint_without_reentrant_generator"
_torch: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there instead


def _carry_through_torch() -> None:
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None or _torch:
        return
    forward = carrying_checkpoint(module.CheckpointFunction.forward, 1)
    generator = carrying_checkpoint(getattr(module, GENERATOR), 0)
    for owner, name, instead in (
        (module.CheckpointFunction, "forward", staticmethod(forward)),
        (module, GENERATOR, generator),
    ):
        _torch.append((owner, name, vars(owner)[name], instead))
        setattr(owner, name, instead)


def _torch_as_before() -> None:
    for owner, name, before, instead in _torch:
        if vars(owner).get(name) is instead:  # someone else's replacement stays
            setattr(owner, name, before)
    _torch.clear()
