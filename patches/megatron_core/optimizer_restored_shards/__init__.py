"""`offload_to_cpu()` and `restore_from_cpu()` of megatron-core's optimizers, and of DDP's buffers.

What is wrong (0.15 to 0.20, and 5 from 0.16):
1. An optimizer without copies in fp32 steps on the model's own weights: the precision-aware one on shards that are
   views of DDP's buffer of weights, as that for weights in fp32 does, and the plain one for fp32 on the weights
   themselves. `offload_to_cpu` moves these too.
   - `restore_from_cpu` gives them memory of their own. With a precision-aware optimizer nobody copies from there to the
     buffer, so every later step changes no weight of the model, in silence.
   - A model with a plain optimizer for fp32 lies on the host, so the rollout that memory was freed for cannot run. And
     torch drops the hooks by which DDP gets gradients from a weight whose data changes its device (seen on a CPU with
     data that changes its type, which torch treats alike).
   - Behind `offload_to_cpu` of the buffers, shards have no memory any more: the copy ends the process.
2. `restore_from_cpu` moves every state to the device, also what was on the host before: the moments of weights that
   optimizer_cpu_offload keeps there, so that the next step raises, and the step counts of torch's optimizers, which
   then wait for the device at each weight.
3. 0.15 does not import logging, which both methods use: NameError.
4. Gradients of main weights stay on the device, in fp32, if DDP sums in bf16 (the default of its config).
5. `offload_to_cpu` of a buffer leaves the weights of a model with a plain optimizer, which lie in no buffer, and frozen
   weights, which under LoRA are nearly all.

What the patch does: weights of the model stay where an optimizer moves, and states on the host stay there. Gradients of
main weights go with it. Copies in fp32 and other states move as on stock. A buffer takes its weights that lie outside
of it, in place, and the first buffer of a model the frozen ones, whose data then lies on the host. A module that lacks
the name gets logging.

What it leaves alone: frozen weights of a model that was wrapped in DDP before shim.apply(), or is frozen as a whole and
has no buffer; weights in FP8; buffers of modules. Gradients in DDP's buffers come back as zeros, as upstream's
docstrings say, and trainers rely on it.

Upstream: open, not reported.

Delete when: all supported releases leave the model's weights to the buffers, and buffers take them all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function, argument
from shim.patches._named import Named
from shim.patches.megatron_core import _left_by_a_sleep as left

MODULE = "megatron.core.optimizer.optimizer"
BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer."
WRAPPER = "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__"


class _OnHost(Named, WeakKeyDictionary[Any, list[tuple[dict[str, Any], str, Tensor]]]):
    """Optimizer -> its states that were on the host when it was offloaded: (states of a weight, name, state)."""


_ON_HOST = _OnHost()


def _offload_to_cpu(original: Function) -> Function:
    @functools.wraps(original)
    def offload_to_cpu(*args: Any, **kwargs: Any) -> Any:
        on_host = [each for each in _states(args[0]) if not each[2].is_cuda]
        left.gradients_leave(args[0])
        with _without_weights_of_the_model(args[0]):
            result = original(*args, **kwargs)
        _ON_HOST.setdefault(args[0], on_host)  # a second call finds all of them there
        return result

    return offload_to_cpu


def _restore_from_cpu(original: Function) -> Function:
    @functools.wraps(original)
    def restore_from_cpu(*args: Any, **kwargs: Any) -> Any:
        on_host = [
            (states, name, state) for states, name, state in _ON_HOST.pop(args[0], ()) if states.get(name) is state
        ]
        with _without_weights_of_the_model(args[0]):
            result = original(*args, **kwargs)
        for states, name, state in on_host:
            states[name] = state
        left.gradients_return(args[0])
        return result

    return restore_from_cpu


@contextlib.contextmanager
def _without_weights_of_the_model(optimizer: Any) -> Iterator[None]:
    """Inside, its groups hold copies alone."""
    of_the_model = left.is_of_the_model(optimizer)
    groups = getattr(getattr(optimizer, "optimizer", None), "param_groups", [])
    weights = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [weight for weight in group["params"] if not of_the_model(weight)]
        yield
    finally:
        for group, own in zip(groups, weights, strict=True):
            group["params"] = own


def _buffer(also: Callable[[Any], None]) -> Callable[[Function], Function]:
    """Around a method of a buffer that moves weights: also what it leaves."""

    def factory(original: Function) -> Function:
        moves_weights = argument(original, "move_params")

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if moves_weights(args, kwargs):
                also(args[0])
            return result

        return method

    return factory


def _states(optimizer: Any) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for states in getattr(getattr(optimizer, "optimizer", None), "state", {}).values():
        for name, state in states.items():
            if isinstance(state, Tensor):
                yield states, name, state


def _logging(original: Any) -> Any:
    return original if hasattr(original, "INFO") else logging


def _held() -> str:
    number = left.held()
    return f"gradients or weights of {number} optimizers and buffers on the host" if number else ""


def bindings(variant: str, options: Mapping[str, Any]) -> Bindings:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    owner = f"{MODULE}:MegatronOptimizer"
    targets: dict[str, Callable[[Any], Any]] = {
        f"{owner}.offload_to_cpu": _offload_to_cpu,
        f"{owner}.restore_from_cpu": _restore_from_cpu,
        f"{MODULE}:logging": _logging,
    }
    if variant == "v0_16":
        targets |= {f"{BUFFER}offload_to_cpu": _buffer(left.weights_leave)}
        targets |= {f"{BUFFER}reload_from_cpu": _buffer(left.weights_return), WRAPPER: left.remember}
    return Bindings(targets, Resource(_held))
