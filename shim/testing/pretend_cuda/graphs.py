"""CUDA graphs: what a capture records, and its replay on the same memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim._torch_names import find

from .state import CaptureError, state
from .tensor import without_modes
from .trees import tensors_in, with_tensors

__all__ = ["CUDAGraph", "Graph", "capture_of", "graph_pool_handle"]


class Graph:
    """The operations of a capture, in order, with the memory that they read and write.

    A capture computes nothing: what it has written to memory of before is put back at its end.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._made: set[int] = set()  # storages of the capture itself, by address of their structure
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> (memory of before the capture, its bytes)
        self._aliases: dict[int, list[Tensor]] = {}  # storage of before -> what the graph itself holds of it

    def will_write(self, tensors: Iterable[Tensor]) -> None:
        """Keep what these tensors hold, if they are older than the capture."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage._cdata] = memory, memory.clone()

    def add(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
        """An operation with the values of its arguments, and its result, which every replay writes again."""
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        made = [tensor for tensor in tensors_in(found) if tensor.untyped_storage()._cdata not in given]
        self._made |= {tensor.untyped_storage()._cdata for tensor in made}
        if not made and not function._schema.is_mutable:
            return  # a view
        held = with_tensors(self._alias, (tuple(args), dict(kwargs)))

        def again() -> None:
            new = function(*held[0], **held[1])
            for old, tensor in zip(tensors_in(found), tensors_in(new), strict=True):
                if old.untyped_storage()._cdata not in given:
                    old.copy_(tensor)

        self._steps.append(again)

    def add_kernel(self, launch: Callable[..., object], args: Any) -> None:
        """A Triton kernel, which launch(args) runs."""
        held = with_tensors(self._alias, args)
        self._steps.append(lambda: launch(held))

    def _alias(self, tensor: Tensor) -> Tensor:
        """Another tensor on the same memory, so that the graph's own share in old memory is known."""
        alias, storage = tensor.detach(), tensor.untyped_storage()._cdata
        if storage not in self._made:
            self._aliases.setdefault(storage, []).append(alias)
        return alias

    def end(self) -> None:
        for memory, content in self._before.values():
            memory.copy_(content)
        self._before.clear()

    def replay(self) -> None:
        """What the device does when the graph is launched: the recorded operations, and nothing of the host."""
        if state().capture is not None:
            raise CaptureError("pretended CUDA: a graph cannot be launched while a stream is capturing")
        freed = [aliases[0] for aliases in self._aliases.values() if _is_last(aliases)]
        if freed:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in freed)
            raise state().fault(f"a graph that uses memory of before its capture, which was freed since: {shapes};")
        for step in self._steps:
            step()


def _is_last(aliases: Sequence[Tensor]) -> bool:
    """Whether nothing but these tensors uses their memory. False if this torch cannot tell."""
    uses: Any = find("torch:_C._storage_Use_Count")
    return uses is not None and uses(aliases[0].untyped_storage()._cdata) <= len(aliases) + 1  # the storage in Python


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
        with without_modes():
            self.graph.end()

    def replay(self) -> None:
        with without_modes():
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
