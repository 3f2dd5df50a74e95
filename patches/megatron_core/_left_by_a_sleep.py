"""What megatron-core's methods for a sleep leave on the device: gradients of main weights, and weights in no buffer.

Weights that are trained, and gradients, are freed in place: DDP has hooks on such a weight, which torch drops if its
data goes to another device and back. A frozen weight has none. Its data lies on the host meanwhile, for trainers that
move frozen weights themselves, and look at their device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

# What moves memory is imported at the first sleep, because most runs have none.
if TYPE_CHECKING:
    from shim._offload.found import Piece
    from shim._offload.memory import Copy

__all__ = [
    "gradients_leave",
    "gradients_return",
    "held",
    "is_of_the_model",
    "remember",
    "weights_leave",
    "weights_return",
]

# Of the distributed optimizer: views of DDP's buffer of weights.
SHARDS = ("shard_float16_groups", "shard_fp32_groups")

_WRAPPED: WeakSet[Any] = WeakSet()  # models in DDP
_GRADIENTS: WeakKeyDictionary[Any, Copy] = WeakKeyDictionary()  # by optimizer
_TRAINED: WeakKeyDictionary[Any, Copy] = WeakKeyDictionary()  # by buffer
_FROZEN: WeakKeyDictionary[Any, list[tuple[nn.Parameter, Piece]]] = WeakKeyDictionary()  # by buffer


def remember(original: Callable[..., None]) -> Callable[..., None]:
    """Around `__init__` of what wraps a model: its buffers do not know the weights that lie in none."""

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _WRAPPED.add(args[0])

    return __init__


def is_of_the_model(optimizer: Any) -> Callable[[Tensor], bool]:
    """Whether an optimizer's weight is the model's own, or a view of it, and no copy."""
    shards = {id(shard) for name in SHARDS for group in getattr(optimizer, name, None) or [] for shard in group}
    return lambda weight: isinstance(weight, nn.Parameter) or id(weight) in shards


def gradients_leave(optimizer: Any) -> None:
    """Free the gradients of main weights, unless they are views of DDP's buffer."""
    from shim._offload.found import GRADIENTS

    if optimizer not in _GRADIENTS:
        groups = getattr(getattr(optimizer, "optimizer", None), "param_groups", [])
        of_the_model = is_of_the_model(optimizer)
        main = [weight for group in groups for weight in group["params"] if not of_the_model(weight)]
        found = [weight.grad for weight in main if weight.grad is not None]
        _GRADIENTS[optimizer] = _freed([each for each in found if _owns_memory(each)], GRADIENTS, optimizer)


def gradients_return(optimizer: Any) -> None:
    if optimizer in _GRADIENTS:
        _put_back(_GRADIENTS.pop(optimizer))


def weights_leave(buffer: Any) -> None:
    """Free weights of a buffer that holds gradients alone; with the first buffer of a model, its frozen weights."""
    from shim._offload.found import WEIGHTS, Piece

    if buffer in _TRAINED:
        return
    frozen = [(weight, Piece(weight)) for weight in _in_no_buffer(buffer) if _is_on_device(weight)]
    copies = [torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=True) for weight, _ in frozen]
    for (weight, _), copy in zip(frozen, copies, strict=True):
        copy.copy_(weight.data)
    _TRAINED[buffer] = _freed(buffer.params if buffer.param_data is None else [], WEIGHTS, buffer)
    for (weight, piece), copy in zip(frozen, copies, strict=True):
        weight.data = copy
        piece.storage.resize_(0)
    _FROZEN[buffer] = frozen


def weights_return(buffer: Any) -> None:
    if buffer in _TRAINED:
        _put_back(_TRAINED.pop(buffer))
    for weight, piece in _FROZEN.pop(buffer, ()):
        if not piece.storage.nbytes():
            piece.storage.resize_(piece.nbytes)
        if weight.shape == piece.tensor.shape:  # else other code has put something else there
            piece.tensor.copy_(weight.data)
            weight.data = piece.tensor


def held() -> int:
    """How many optimizers and buffers have something on the host."""
    return len(_GRADIENTS) + len(_TRAINED)


def _in_no_buffer(buffer: Any) -> list[nn.Parameter]:
    for model in list(_WRAPPED):
        own = [vars(model).get(name) or [] for name in ("buffers", "expert_parallel_buffers")]
        buffers = [each for some in own for each in some]
        if buffers and buffers[0] is buffer:
            inside = {id(weight) for each in buffers for weight in each.params}
            return [weight for weight in model.module.parameters() if id(weight) not in inside]
    return []


def _is_on_device(tensor: Tensor) -> bool:
    try:
        return tensor.is_cuda and bool(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # a tensor that holds its data in attributes, as one of FP8, has no memory
        return False


def _owns_memory(tensor: Tensor) -> bool:
    return _is_on_device(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes


def _freed(tensors: Iterable[Tensor], kind: str, owner: Any) -> Copy:
    from shim._offload.found import Piece
    from shim._offload.memory import Copy

    pieces = {tensor.untyped_storage()._cdata: Piece(tensor) for tensor in tensors if _is_on_device(tensor)}
    for piece in pieces.values():
        piece.kinds.add(kind)
    copy = Copy(list(pieces.values()), owner)
    copy.make(pin=True)
    copy.free()
    return copy


def _put_back(copy: Copy) -> None:
    copy.put_back()
    copy.release()
