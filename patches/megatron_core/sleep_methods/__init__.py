"""The methods of 0.16 that move an optimizer and buffers to the host, on earlier releases.

What is missing (up to 0.15): a trainer that frees memory for a rollout calls `offload_to_cpu` and `restore_from_cpu` of
megatron-core's optimizers, which came with 0.15, `offload_to_cpu` and `reload_from_cpu` of DDP's buffers, and
`offload_grad_buffers` and `restore_grad_buffers` of DistributedDataParallel, which came with 0.16. On earlier releases
it ends with an AttributeError.

The patch adds them, with the arguments of 0.16. States and main weights move to pinned memory, by storages, so that
every tensor and view stays the object that it is. A step and a checkpoint of an optimizer that is asleep raise
OffloadError. Weights of a buffer are copied, and gradients are dropped and come back as zeros, as in 0.16. What the
methods of 0.16 leave goes too, as with optimizer-restored-shards: gradients of main weights, weights of a model with a
plain optimizer, and frozen weights of a model that was wrapped in DDP after shim.apply(). Buffers of modules stay.
`shim.offload` takes all, on every release.

Upstream: these are no defects of a release.

Delete when: 0.16 is the oldest supported release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shim._offload import Offloaded, offload
from shim._offload.found import Piece
from shim._offload.memory import Copy
from shim._resources import Bindings, Resource
from shim.patches.megatron_core import _left_by_a_sleep as left

OPTIMIZER = "megatron.core.optimizer.optimizer:MegatronOptimizer."
BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer."
WRAPPER = "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
GROUPS = ("model_float16_groups", "model_fp32_groups", "float16_groups", "fp32_from_fp32_groups")

_MODELS: WeakKeyDictionary[Any, nn.Module] = WeakKeyDictionary()  # by optimizer: what keeps the memory of the host
_ASLEEP: WeakKeyDictionary[Any, Offloaded] = WeakKeyDictionary()  # by optimizer
_WEIGHTS: WeakKeyDictionary[Any, Copy] = WeakKeyDictionary()  # by buffer
_GRADIENTS: WeakKeyDictionary[Any, Piece] = WeakKeyDictionary()


def offload_to_cpu(self: Any) -> None:
    """Move states and main weights to the host."""
    if self not in _ASLEEP:
        for each in getattr(self, "chained_optimizers", [self]):
            left.gradients_leave(each)
        model = _MODELS.setdefault(self, nn.ParameterList(_weights(self)))
        _ASLEEP[self] = offload(model, self, what=("optimizer", "main_weights"))
        for name in ("offload_to_cpu", "restore_from_cpu"):
            vars(self).pop(name, None)  # refused while others have moved it


def restore_from_cpu(self: Any) -> None:
    """Put them back."""
    asleep = _ASLEEP.get(self)
    if asleep is not None:
        asleep.restore()
        del _ASLEEP[self]
        for each in getattr(self, "chained_optimizers", [self]):
            left.gradients_return(each)


def _weights(optimizer: Any) -> Iterator[nn.Parameter]:
    """The model's, of which it knows some alone by its buffers."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each is not optimizer:
            yield from _weights(each)
            continue
        for buffer in getattr(each, "buffers", None) or []:
            yield from buffer.params
        for group in (group for name in GROUPS for group in getattr(each, name, None) or []):
            yield from group
        for group in getattr(getattr(each, "optimizer", None), "param_groups", []):
            yield from (weight for weight in group["params"] if isinstance(weight, nn.Parameter))


def buffer_offload_to_cpu(self: Any, move_params: bool = True, move_grads: bool = True) -> None:
    """Copy weights to the host and free them; free gradients."""
    one = self.param_data is not None and _storage(self.param_data) is not None
    shared = one and self.grad_data is not None and _storage(self.param_data) == _storage(self.grad_data)
    if move_grads and not shared and self.grad_data is not None and self not in _GRADIENTS:
        _GRADIENTS[self] = Piece(self.grad_data)
        _GRADIENTS[self].storage.resize_(0)
    if move_params and (move_grads or not shared) and one and self not in _WEIGHTS:
        copy = Copy([Piece(self.param_data)], self)
        copy.make(pin=True)
        copy.free()
        _WEIGHTS[self] = copy
    if move_params:
        left.weights_leave(self)


def reload_from_cpu(self: Any, move_params: bool = True, move_grads: bool = True) -> None:
    """Put weights back, and make gradients of zeros."""
    if move_params and self in _WEIGHTS:
        _WEIGHTS[self].put_back()
        _WEIGHTS.pop(self).release()
    if move_params:
        left.weights_return(self)
    if move_grads and self in _GRADIENTS:
        gradients = _GRADIENTS[self]
        gradients.storage.resize_(gradients.nbytes)
        gradients.flat().zero_()
        del _GRADIENTS[self]


def _storage(tensor: torch.Tensor) -> int | None:
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() else None


def offload_grad_buffers(self: Any, synchronize: bool = True, empty_cache: bool = True) -> None:
    """Free the gradients of all buffers."""
    if synchronize:
        torch.cuda.synchronize()
    for buffer in [*self.buffers, *self.expert_parallel_buffers]:
        buffer_offload_to_cpu(buffer, move_params=False)
    if empty_cache:
        torch.cuda.empty_cache()


def restore_grad_buffers(self: Any, synchronize: bool = True) -> None:
    """Make the gradients of all buffers, of zeros."""
    for buffer in [*self.buffers, *self.expert_parallel_buffers]:
        reload_from_cpu(buffer, move_params=False)
    if synchronize:
        torch.cuda.synchronize()


def _held() -> str:
    number = len(_ASLEEP) + len(_WEIGHTS) + left.held()
    return f"copies on the host of {number} optimizers and buffers that are asleep" if number else ""


def bindings(variant: str, options: Mapping[str, Any]) -> Bindings:
    """Target -> factory for a variant. A factory takes upstream's object, here none, and returns the method."""
    methods: dict[str, Callable[..., None]] = {
        f"{BUFFER}offload_to_cpu": buffer_offload_to_cpu,
        f"{BUFFER}reload_from_cpu": reload_from_cpu,
        f"{DDP}offload_grad_buffers": offload_grad_buffers,
        f"{DDP}restore_grad_buffers": restore_grad_buffers,
    }
    if variant == "v0_12":
        methods |= {f"{OPTIMIZER}offload_to_cpu": offload_to_cpu, f"{OPTIMIZER}restore_from_cpu": restore_from_cpu}
    added: dict[str, Callable[[Any], Any]] = {target: _added(method) for target, method in methods.items()}
    return Bindings({**added, WRAPPER: left.remember}, Resource(_held))


def _added(method: Callable[..., None]) -> Callable[[Any], Any]:
    return lambda missing: method
