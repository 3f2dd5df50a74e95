"""Where libraries keep a function for a recompute in backward, and which config values the function sees then.

This module holds state of the process: which config fields are claimed now, and by whom. No frame and no thread-local
can carry that, because recompute runs in backward, often on another thread and after the override has ended.

A claim is the wish of one caller for one value of one field. An override makes claims, and so does a recompute that
must see the values of its forward pass. The rules:

1. A claim writes its value. At its end it restores the value from its start. If the claim ends below others, the
   claim above it restores that value later.
2. Claims of one caller (a thread and a task of asyncio) nest. A claim of another caller must want the value that the
   field holds, else OptionError. While a recompute runs, no task of its thread can go on, so its claims nest with all.
3. A claim that would change a field is refused while another thread is inside a recompute that reaches the config.
4. While claims exist, and only then, the attributes in which checkpoints keep their functions are watched. A function
   stored then keeps the values of that moment. A function stored earlier runs with the values from before all claims.

Without a claim, checkpoints run as if this module did not exist: they keep the function they were given.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from shim._config_override.threads import Caller, caller, reaches, recomputing_elsewhere
from shim._config_override.values import MISSING, Captured, Held, held, put, same
from shim._errors import NotMetError, OptionError
from shim._threads import renew_in_children

__all__ = ["carrying", "claimed", "entered", "marked", "refuse_what_is_not_carried"]

MARK = "_carries_config_overrides"


class Place(NamedTuple):
    """A library's class whose instances keep a function in an attribute, and the function that runs it again.

    `patch` binds `bound`, so the fingerprints have proved that the release still does this. torch has no patch; see
    `_keeps_as_expected`.
    """

    module: str
    holder: str
    attribute: str
    again: str
    patch: str | None = None
    bound: str = ""


_MEGATRON, _TE = "megatron.core.tensor_parallel.random", "transformer_engine.pytorch.distributed"
_TORCH = "torch.utils.checkpoint"
_REENTRANT = ("run_function", "CheckpointFunction.backward")
_UNPACK = ("recompute_fn", "_checkpoint_hook.__init__.unpack_hook")

_OF_MEGATRON, _OF_TE = "config-override", "te-config-override"
_WITHOUT_OUTPUT = ("run_function", "CheckpointWithoutOutput._recompute")

PLACES = (
    Place(_MEGATRON, "CheckpointFunction", *_REENTRANT, _OF_MEGATRON, "CheckpointFunction.forward"),
    Place(_MEGATRON, "CheckpointWithoutOutput", *_WITHOUT_OUTPUT, _OF_MEGATRON, "CheckpointWithoutOutput.checkpoint"),
    Place(_TE, "_CheckpointFunction", "run_function", "_CheckpointFunction.backward", _OF_TE, "checkpoint"),
    Place(_TE, "_CheckpointFrame", *_UNPACK, _OF_TE, "checkpoint"),
    Place(_TORCH, "CheckpointFunction", *_REENTRANT),
    Place(_TORCH, "_CheckpointFrame", *_UNPACK),
)


class _Claim:
    """The wish of one caller for one value of one field."""

    def __init__(self, config: Any, name: str, caller: Caller, may_suspend: bool) -> None:
        self.config, self.name, self.caller, self.may_suspend = config, name, caller, may_suspend
        self.before = held(config, name)


class Wanted(NamedTuple):
    """A value that a field is to have."""

    config: Any
    name: str
    value: Held


_claims: dict[tuple[int, str], list[_Claim]] = {}  # field -> claims, oldest first; a claim keeps its config alive
_watched: list[tuple[type, str, Any, Any]] = []  # class, attribute, object before, object now
_lock = threading.RLock()
renew_in_children(sys.modules[__name__], "_lock", threading.RLock)


@contextmanager
def claimed(wanted: Callable[[], Iterable[Wanted]], may_suspend: bool = False) -> Iterator[None]:
    """Give the fields the values that `wanted` returns, all or none. `wanted` is called under the lock.

    may_suspend: whether other tasks of this thread may run before the end. Inside a recompute none can.
    """
    with ExitStack() as stack:
        with _lock:
            for config, name, value in wanted():
                stack.callback(_end, _begin(config, name, value, may_suspend))
        yield


def _begin(config: Any, name: str, wanted: Held, may_suspend: bool) -> _Claim:
    claim = _Claim(config, name, caller(), may_suspend)
    now = claim.before
    changes = not same(now.value, wanted.value)
    other = _in_the_way(claim) if changes else None
    if other:
        raise OptionError(
            f"config_override: another {other} has set {name!r} of this {_kind(config)} to {now.value!r}, and this one "
            f"wants {wanted.value!r}. Remedy: give each of them a separate config."
        )
    _claims.setdefault((id(config), name), []).append(claim)
    try:
        _watch()
        codes = {code for place in PLACES for code in _recomputing(place)}
        if changes and recomputing_elsewhere(codes, config, lambda frame: _captured(frame, config, name)):
            raise OptionError(
                f"config_override: another thread is recomputing code that can read {name!r} of this {_kind(config)}, "
                f"and this one wants {wanted.value!r} instead of {now.value!r}. Remedy: give each of them a separate "
                "config, or wait for the other's backward."
            )
        put(config, name, wanted)
    except BaseException:
        with ExitStack() as stack:  # forget the claim even if a half-done write cannot be undone
            stack.callback(_forget, claim)
            put(config, name, now)
        raise
    return claim


def _in_the_way(claim: _Claim) -> str | None:
    """The kind of caller ("thread" or "task") whose claimed value `claim` would change; None if there is none."""
    others = _claims.get((id(claim.config), claim.name), [])
    if any(other.caller.thread != claim.caller.thread for other in others):
        return "thread"
    for other in reversed(others):
        if not (claim.may_suspend and other.may_suspend):  # other tasks go on only after the recompute
            return None
        if not other.caller.waits():
            return "task"
    return None


def _end(claim: _Claim) -> None:
    with _lock, ExitStack() as stack:
        above = _above(claim)
        stack.callback(_forget, claim)
        if above is None:
            put(claim.config, claim.name, claim.before)
        else:
            above.before = claim.before


def _captured(frame: types.FrameType, config: Any, name: str) -> bool:
    """Whether the frame is a call of a _Carried with a value for the field, which it claims now or will claim."""
    carried = frame.f_locals.get("self") if frame.f_code is _Carried.__call__.__code__ else None
    return carried is not None and any(one.config is config and one.name == name for one in carried.seen)


def _above(claim: _Claim) -> _Claim | None:
    claims = _claims[id(claim.config), claim.name]
    return next(iter(claims[claims.index(claim) + 1 :]), None)


def _forget(claim: _Claim) -> None:
    key = id(claim.config), claim.name
    _claims[key].remove(claim)
    if not _claims[key]:
        del _claims[key]
    if not _claims:
        _unwatch()


def _kind(config: Any) -> str:
    return config.__name__ if isinstance(config, type) else type(config).__name__


# Recompute


class _Carried:
    """A function that always sees the values in `seen`, and other claimed fields as if unclaimed."""

    def __init__(self, function: Callable[..., Any], seen: tuple[Captured, ...]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.seen = function, seen

    @property
    def __closure__(self) -> tuple[types.CellType, ...]:
        """Trainers look for a layer among the cells of the function that a checkpoint runs again."""
        return (types.CellType(self.function), *(getattr(self.function, "__closure__", None) or ()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.seen and not _claims:
            return self.function(*args, **kwargs)
        with claimed(self._wanted):
            return self.function(*args, **kwargs)

    def _wanted(self) -> list[Wanted]:
        then = {(id(one.config), one.name) for one in self.seen}
        lowest = [claims[0] for claims in _concerning(self.function)]
        since = [claim for claim in lowest if (id(claim.config), claim.name) not in then]
        return [
            *(Wanted(one.config, one.name, one.again()) for one in self.seen),
            *(Wanted(claim.config, claim.name, claim.before) for claim in since),
        ]


def carrying(function: Any) -> Any:
    """The function a checkpoint keeps: `function` with the current values of claimed fields, or `function` itself."""
    if not _claims or not callable(function) or isinstance(function, _Carried):
        return function
    with _lock:
        seen = tuple(Captured(claims[0].config, claims[0].name) for claims in _concerning(function))
    return _Carried(function, seen) if seen else function


def _concerning(function: Any) -> list[list[_Claim]]:
    """Claims per field: those of this thread, and those of others on a config that `function` reaches."""
    ours = caller().thread
    return [
        claims
        for claims in _claims.values()
        if any(claim.caller.thread == ours for claim in claims) or reaches([function], claims[0].config)
    ]


def entered() -> str:
    """The changes of overrides and recomputes to the process now, in words; "" for none."""
    with _lock:
        if not _claims:
            return ""
        names = ", ".join(sorted({name for _, name in _claims}))
        return f"shim.config_override is entered ({names}), and {len(_watched)} classes of checkpoints are watched"


class _Kept:
    """A descriptor for the attribute in which instances of a class keep the function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError(self.name)
        try:
            kept = vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None
        return kept if isinstance(kept, _Carried) or not callable(kept) else _Carried(kept, ())

    def __set__(self, instance: Any, function: Any) -> None:
        vars(instance)[self.name] = carrying(function)

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self.name]


def _watch() -> None:
    for place in PLACES:
        module = sys.modules.get(place.module)
        if module is None:
            continue
        for holder in _holders(getattr(module, place.holder)):
            if not isinstance(vars(holder).get(place.attribute), _Kept):
                instead = _Kept(place.attribute)
                _watched.append((holder, place.attribute, vars(holder).get(place.attribute, MISSING), instead))
                setattr(holder, place.attribute, instead)


def _holders(holder: Any) -> list[type]:
    """The classes of the instances. For an autograd function: its context class, and those of its subclasses."""
    if not hasattr(holder, "_backward_cls"):
        return [holder]
    return [holder._backward_cls, *(kind for sub in holder.__subclasses__() for kind in _holders(sub))]


def _unwatch() -> None:
    while _watched:
        holder, name, before, instead = _watched.pop()
        if vars(holder).get(name) is instead:  # a foreign replacement stays
            if before is MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, before)


def _recomputing(place: Place) -> Iterator[types.CodeType]:
    """The code that runs the function again: upstream's, a replacement's, and that of functions they wrap."""
    value: Any = sys.modules.get(place.module)
    for part in place.again.split(".") if value is not None else ():
        code = getattr(value, "__code__", None)
        if code is not None:  # a nested function
            value = next((c for c in code.co_consts if getattr(c, "co_name", None) == part), None)
        else:
            value = getattr(value, part, None)
    while value is not None:
        code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
        if code is not None:
            yield code
        value = getattr(value, "__wrapped__", None)


def _keeps_as_expected(module: types.ModuleType, place: Place) -> bool:
    """For a library without a patch, and so without fingerprints: whether its class writes the attribute."""
    holder = getattr(module, place.holder, None)
    writers = (getattr(holder, name, None) for name in ("__init__", "forward"))
    return any(place.attribute in getattr(getattr(one, "__code__", None), "co_names", ()) for one in writers)


def marked(original: Callable[..., Any]) -> Callable[..., Any]:
    """A marked `original`: the patch declares that its release keeps the function in the place that PLACES names."""

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(checkpoint, MARK, True)  # functools.wraps copies the mark to wrappers of other patches
    return checkpoint


def refuse_what_is_not_carried() -> None:
    """Raise NotMetError if a loaded library would recompute with other values."""
    for place in PLACES:
        module = sys.modules.get(place.module)
        if module is None:
            continue
        if place.patch is None:
            carried, remedy = _keeps_as_expected(module, place), "give the layers a separate config"
        else:
            found: Any = module
            for part in place.bound.split("."):
                found = getattr(found, part, None)
            carried = getattr(found, MARK, False)
            remedy = f"apply the patch {place.patch} (shim.apply()), or give the layers a separate config"
        if not carried:
            raise NotMetError(
                f"config_override: {place.module}:{place.bound or place.holder} would recompute the code in this block "
                f"with other values. Remedy: {remedy}."
            )
