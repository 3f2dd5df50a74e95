"""CUDA graphs: what a capture records, and its replay on the same memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .state import CaptureError, state
from .trees import tensors_in

__all__ = ["CUDAGraph", "Graph", "capture_of", "graph_pool_handle"]


class Graph:
    """The operations of a capture, in order, with the memory that they have read and written."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
        """An operation with the values of its arguments, and its result, which every replay writes again."""
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        made = [tensor for tensor in tensors_in(found) if tensor.untyped_storage()._cdata not in given]
        if not made and not function._schema.is_mutable:
            return  # a view

        def again() -> None:
            new = function(*args, **kwargs)
            for old, tensor in zip(tensors_in(found), tensors_in(new), strict=True):
                if old.untyped_storage()._cdata not in given:
                    old.copy_(tensor)

        self._steps.append(again)

    def add_kernel(self, launch: Callable[[], object]) -> None:
        self._steps.append(launch)

    def replay(self) -> None:
        """What the device does when the graph is launched: the recorded operations, and nothing of the host."""
        if state().capture is not None:
            raise CaptureError("pretended CUDA: a graph cannot be launched while a stream is capturing")
        for step in self._steps:
            step()


class CUDAGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.graph = Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if state().capture is not None:
            raise CaptureError("pretended CUDA: a stream is capturing already")
        self.graph = Graph()
        state().capture = self.graph

    def capture_end(self) -> None:
        state().capture = None

    def replay(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            self.graph.replay()

    def reset(self) -> None:
        self.graph = Graph()

    def pool(self) -> tuple[int, int]:
        return graph_pool_handle()

    def register_generator_state(self, generator: Any) -> None: ...


_POOLS = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_POOLS)


@contextlib.contextmanager
def capture_of(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """In the place of torch.cuda.graph: what runs inside is captured, and what the host may not do there raises."""
    cuda_graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        cuda_graph.capture_end()
