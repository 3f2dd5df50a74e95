"""Calls that would use memory that is not there: refused, instead of a crash of the process or an empty file."""

from __future__ import annotations

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
        self.own = vars(owner).get(name)  # what the object itself had there, mostly nothing
        self.call = getattr(owner, name)
        self.by: list[Guard] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for guard in list(self.by):
            asleep = [kind for kind in guard.kinds if kind in self.kinds]
            if self.name == "forward" and not torch.is_grad_enabled():  # no backward follows, which writes gradients
                asleep = [kind for kind in asleep if kind == WEIGHTS]
            if asleep:
                raise OffloadError(
                    f"{type(self.owner).__name__}.{self.name}() needs what is asleep: {', '.join(asleep)}, by "
                    f"shim.offload() at {guard.where}. Call restore() on what that call returned first"
                )
        return self.call(*args, **kwargs)


class Guard:
    """While up, methods of these objects that need one of `kinds` raise OffloadError. Any number may be up at once."""

    def __init__(
        self,
        modules: Iterable[Any],
        optimizers: Iterable[Any],
        kinds: Collection[str],
        where: str,
        but: Collection[str] = (),
    ) -> None:
        """but: methods that may be called."""
        self.kinds, self.where = kinds, where
        self._up: list[_Refusal] = []
        for objects, methods in ((modules, _OF_MODULES), (optimizers, _OF_OPTIMIZERS)):
            wanted = [(name, needs) for name, needs in methods.items() if needs & set(kinds) and name not in but]
            for owner in objects:
                for name, needs in wanted:
                    if callable(getattr(owner, name, None)):
                        self._put_up(owner, name, needs)

    def _put_up(self, owner: Any, name: str, needs: Collection[str]) -> None:
        refusal = vars(owner).get(name)
        if not isinstance(refusal, _Refusal):
            refusal = vars(owner)[name] = _Refusal(owner, name, needs)
        refusal.by.append(self)
        self._up.append(refusal)

    def take_down(self) -> None:
        for refusal in self._up:
            refusal.by.remove(self)
            held = vars(refusal.owner)
            if refusal.by or held.get(refusal.name) is not refusal:  # whoever has wrapped it meanwhile calls through
                continue
            if refusal.own is None:
                del held[refusal.name]
            else:
                held[refusal.name] = refusal.own
        self._up = []
