"""Calls that would use memory that is not there: refused, instead of a crash of the process or an empty file."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import torch

from shim._errors import OffloadError
from shim._offload.found import GRADIENTS, MAIN, OPTIMIZER, WEIGHTS

__all__ = ["Guard"]

_GRADS, _WEIGHTS = frozenset({GRADIENTS}), frozenset({WEIGHTS})
_STATES = frozenset({OPTIMIZER, MAIN, WEIGHTS})
# Method -> the kinds, any of which must not be asleep.
_OF_MODULES = {
    "forward": _WEIGHTS | _GRADS,
    **dict.fromkeys(("_save_to_state_dict", "_load_from_state_dict", "sharded_state_dict"), _WEIGHTS),
    **dict.fromkeys(("broadcast_params", "start_param_sync"), _WEIGHTS),
    **dict.fromkeys(("zero_grad_buffer", "start_grad_sync", "finish_grad_sync", "scale_gradients"), _GRADS),
}
_OF_OPTIMIZERS = {
    **dict.fromkeys(("step", "prepare_grads", "step_with_ready_grads", "get_grad_norm"), _STATES | _GRADS),
    **dict.fromkeys(("state_dict", "sharded_state_dict", "load_state_dict", "reload_model_params"), _STATES),
    **dict.fromkeys(("save_parameter_state", "load_parameter_state", "offload_to_cpu", "restore_from_cpu"), _STATES),
    "zero_grad": _GRADS,
}


class _Refusal:
    """Stands on an object for one of its methods. by: the guards that are up."""

    def __init__(self, owner: Any, name: str, kinds: Collection[str]) -> None:
        self.owner, self.name, self.kinds = owner, name, kinds
        self.own = {name: vars(owner)[name]} if name in vars(owner) else {}
        self.call = getattr(owner, name)
        self.by: list[Guard] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        no_backward = self.name == "forward" and not torch.is_grad_enabled()  # which writes gradients
        for guard in list(self.by):
            asleep = [kind for kind in guard.kinds if kind in (_WEIGHTS if no_backward else self.kinds)]
            if asleep:
                raise OffloadError(
                    f"{type(self.owner).__name__}.{self.name}() needs what is asleep: {', '.join(asleep)}, by "
                    f"shim.offload() at {guard.where}. Call restore() on what that call returned first"
                )
        return self.call(*args, **kwargs)


class Guard:
    """While up, methods of objects that need one of `kinds` raise OffloadError. Any number may be up at once."""

    def __init__(self, kinds: Collection[str], where: str) -> None:
        self.kinds, self.where = kinds, where
        self._up: list[_Refusal] = []

    def put_up(self, modules: Iterable[Any], optimizers: Iterable[Any]) -> None:
        for objects, methods in ((modules, _OF_MODULES), (optimizers, _OF_OPTIMIZERS)):
            for owner, (name, needs) in itertools.product(objects, methods.items()):
                method = getattr(owner, name, None)
                if needs & set(self.kinds) and callable(method):
                    refusal = method if isinstance(method, _Refusal) else _Refusal(owner, name, needs)
                    self._up.append(refusal)
                    refusal.by.append(self)
                    vars(owner)[name] = refusal

    def take_down(self) -> None:
        for refusal in self._up:
            refusal.by = [guard for guard in refusal.by if guard is not self]
            held = vars(refusal.owner)
            if not refusal.by and held.get(refusal.name) is refusal:  # else whoever has wrapped it since calls through
                del held[refusal.name]
                held.update(refusal.own)
        self._up = []
