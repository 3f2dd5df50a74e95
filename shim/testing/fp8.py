"""The FP8 state of Transformer Engine, on any TE release: the current state, or its changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["Fp8Event", "Fp8State", "fp8_state", "record_fp8_events", "state_manager"]


class Fp8State(NamedTuple):
    """The state set by TE's FP8 contexts. The recompute flags are those of TE's checkpoint."""

    enabled: bool
    calibrating: bool
    recipe: Any  # None outside of every context
    group: Any
    recompute_enabled: bool
    recompute_phase: bool


class Fp8Event(NamedTuple):
    """One change of TE's FP8 state.

    kind: "enter" or "exit" of an autocast, or "reduce" for a call of reduce_and_update_fp8_tensors. recipe: the type
    name of the autocast's recipe; for "reduce", of the current recipe. depth: how many autocasts are open afterwards.
    forward: the argument of a "reduce" call.
    """

    kind: str
    enabled: bool
    recipe: str | None
    depth: int
    forward: bool | None = None


def state_manager() -> Any:
    """FP8GlobalStateManager, read from TE's checkpoint module, because its module changed in 2.9."""
    return import_module("transformer_engine.pytorch.distributed").FP8GlobalStateManager


def _prefix(manager: Any) -> str:
    """The prefix of its method names, dropped in 2.9. The depth shows it: methods may have aliases by both names."""
    return "fp8_" if hasattr(manager, "FP8_AUTOCAST_DEPTH") else ""


def fp8_state() -> Fp8State:
    """TE's FP8 state now, on any TE release."""
    manager = state_manager()
    distributed = import_module("transformer_engine.pytorch.distributed")
    enabled, calibrating, recipe, group, *_rest = getattr(manager, f"get_{_prefix(manager)}autocast_state")()
    return Fp8State(
        enabled,
        calibrating,
        recipe,
        group,
        distributed.is_fp8_activation_recompute_enabled(),
        distributed.in_fp8_activation_recompute_phase(),
    )


def _depth(manager: Any) -> int:
    state = getattr(manager, "quantization_state", None)  # from 2.15
    return state.autocast_depth if state is not None else getattr(manager, f"{_prefix(manager).upper()}AUTOCAST_DEPTH")


@contextlib.contextmanager
def record_fp8_events() -> Iterator[list[Fp8Event]]:
    """Collect the Fp8Events inside, in order. TE's methods are restored on exit.

    The exit of an autocast that was entered earlier has no recipe (None). An autocast that TE refuses to enter is no
    event.
    """
    manager = state_manager()
    prefix = _prefix(manager)
    events: list[Fp8Event] = []
    open_recipes: list[str] = []

    def entered(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        state = fp8_state()
        open_recipes.append(type(state.recipe).__name__)
        events.append(Fp8Event("enter", state.enabled, open_recipes[-1], _depth(manager)))
        return result

    def exited(original: Callable[..., Any], enabled: bool, *args: Any, **kwargs: Any) -> Any:
        recipe = open_recipes.pop() if open_recipes else None
        # Before the call, which may reduce: a reduce event comes after the exit.
        events.append(Fp8Event("exit", enabled, recipe, _depth(manager) - 1))
        return original(enabled, *args, **kwargs)

    def reduced(original: Callable[..., Any], forward: bool = True) -> Any:
        state = fp8_state()
        recipe = None if state.recipe is None else type(state.recipe).__name__
        events.append(Fp8Event("reduce", state.enabled, recipe, _depth(manager), forward))
        return original(forward)

    watched: dict[str, Callable[..., Any]] = {
        f"{prefix}autocast_enter": entered,
        f"{prefix}autocast_exit": exited,
        "reduce_and_update_fp8_tensors": reduced,
    }
    with contextlib.ExitStack() as undo:
        for name, watch in watched.items():
            undo.callback(setattr, manager, name, vars(manager)[name])
            setattr(manager, name, staticmethod(partial(watch, getattr(manager, name))))
        yield events
