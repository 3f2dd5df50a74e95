"""Transformer Engine's multi-tensor operations by torch: each reaches the same chunks as the compiled loop.

The compiled operations read lists of tensors in chunks. A loop on the host fills a table with tensors and a list with
their chunks, and launches a kernel whenever one of the two is full, or the last chunk of the last tensor is in. It asks
this only for a chunk, so that a tensor without elements never makes it launch. This follows from
csrc/multi_tensor_apply.cuh of TE 2.1 to 2.3, and common/multi_tensor/multi_tensor_apply.cuh from 2.4 on. The arithmetic
within a chunk is torch's.

    with testing.te_cuda_stand_ins(), testing.multi_tensor_ops():
        transformer_engine.pytorch.optimizers.FusedAdam(parameters).step()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from .transformer_engine import compiled_ops

__all__ = ["TableOverrunError", "launches", "multi_tensor_ops"]

TENSORS = (110, 64, 48, 36, 30, 24)  # that the table holds, for one list of tensors, two, ...
CHUNKS = 320  # in a launch
REFUSED_FROM = Version("2.18")  # tensors without elements

Lists = Sequence[Sequence[Tensor]]


class TableOverrunError(RuntimeError):
    """The compiled loop would write behind its table of tensors: undefined behaviour, on a GPU a fault or worse."""


def launches(sizes: Sequence[int], chunk_size: int, lists: int) -> list[list[tuple[int, int]]]:
    """The launches of the compiled loop: for each the pairs (tensor, chunk) that its kernel reads, in order.

    sizes: the elements of each tensor of the first list. chunk_size: in elements. lists: how many lists of tensors the
        operation takes, 1 to 6.

    Raises TableOverrunError if a tensor without elements takes the last place of the table, and another one follows.
    """
    done: list[list[tuple[int, int]]] = []
    waiting: list[tuple[int, int]] = []
    held, most = 0, TENSORS[lists - 1]
    for tensor, size in enumerate(sizes):
        if held == most:
            raise TableOverrunError(
                f"tensor {tensor} would stand behind a table of {most}: the one before it has no elements, so that "
                "nothing was launched"
            )
        held += 1
        last_chunk = -(-size // chunk_size) - 1
        for chunk in range(last_chunk + 1):
            waiting.append((tensor, chunk))
            whole = chunk == last_chunk
            if len(waiting) == CHUNKS or (whole and (held == most or tensor == len(sizes) - 1)):
                done.append(waiting)
                waiting, held = [], 0 if whole else 1
    return done


def _chunks(chunk_size: int, lists: Lists) -> Iterator[tuple[int, list[Tensor]]]:
    """Number of the tensor, and its part of each list, for each chunk that is launched."""
    sizes = [tensor.numel() for tensor in lists[0]]
    if not all(sizes) and Version(version("transformer-engine")) >= REFUSED_FROM:
        raise RuntimeError("multi_tensor_apply of this release takes no tensor without elements")
    for launch in launches(sizes, chunk_size, len(lists)):
        for tensor, chunk in launch:
            yield tensor, [one[tensor].view(-1)[chunk * chunk_size :][:chunk_size] for one in lists]


def _l2norm(chunk_size: int, noop_flag: Tensor, lists: Lists, per_tensor: bool | None = None) -> tuple[Tensor, Tensor]:
    """The norm of all, [1], and those of each tensor, [n] or [0], in fp32."""
    squares = lists[0][0].new_zeros(len(lists[0]), dtype=torch.float32)
    for tensor, (part,) in _chunks(chunk_size, lists):
        squares[tensor] += part.float().square().sum()
    return squares.sum().sqrt().reshape(1), squares.sqrt() if per_tensor else squares.new_empty(0)


def _scale(chunk_size: int, noop_flag: Tensor, lists: Lists, scale: float | Tensor) -> None:
    """Write the first list, times `scale`, into the second."""
    for _, (source, target) in _chunks(chunk_size, lists):
        target.copy_(source * scale)


def _adam(
    chunk_size: int,
    noop_flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam on lists of gradients, weights, both moments and, if there are five, main weights.

    mode: 1 for weight decay apart from the gradient, as AdamW has it, 0 for weight decay within it.
    """
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for _, (given, weight, mean, square, *main) in _chunks(chunk_size, lists):
        master = main[0] if main else weight
        old, gradient = master.float(), given.float()
        if mode == 0:
            gradient = gradient + weight_decay * old
        mean.copy_(torch.lerp(gradient, mean.float(), beta1))
        square.copy_(torch.lerp(gradient.square(), square.float(), beta2))
        update = (mean.float() / first) / ((square.float() / second).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * old
        master.copy_(old - lr * update)
        if main:
            weight.copy_(master)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "multi_tensor_l2norm": _l2norm,
    "multi_tensor_scale": _scale,
    "multi_tensor_scale_tensor": _scale,
    "multi_tensor_adam": _adam,
}


@contextlib.contextmanager
def multi_tensor_ops() -> Iterator[None]:
    """Let the operations of FusedAdam, of gradient norms and of clipping run without TE's compiled part.

    These are multi_tensor_l2norm, multi_tensor_scale, multi_tensor_scale_tensor and multi_tensor_adam, on contiguous
    tensors of any floating dtype. A tensor without elements has the effect that it has in the compiled loop of the TE
    release on the path: up to 2.17.1 the chunks that wait for a launch are lost behind it, or TableOverrunError says
    that the loop would write out of bounds; from 2.18 on it is refused with a RuntimeError. Process-wide.
    """
    with compiled_ops(_OPERATIONS):
        yield
