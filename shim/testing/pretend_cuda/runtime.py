"""What stands in for torch.cuda: streams and events without work to order, one device, its random numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from shim._torch_names import IN_C

from .graphs import CUDAGraph, capture_of, graph_pool_handle
from .state import state
from .tensor import DEVICE

__all__ = ["Event", "Stream", "substituted"]

MEMORY = 80 << 30
PROPERTIES = SimpleNamespace(
    name="pretended",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=MEMORY,
    warp_size=32,
    shared_memory_per_block_optin=232448,
)


class Event:
    """An event that has happened at once, which the host knows once it has asked.

    captured: the graph in which it was recorded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded = False
        self.known = True
        self.captured: Any = None

    def record(self, stream: Any = None) -> None:
        self.recorded, self.known, self.captured = True, False, state().capture

    def wait(self, stream: Any = None) -> None:
        if self.recorded and self.captured is not state().capture:
            state().not_while_capturing("a wait for an event that was recorded outside of the capture")

    def synchronize(self) -> None:
        state().not_while_capturing("Event.synchronize")
        if not self.known:
            state().count("host_reads", "Event.synchronize")
        self.known = True

    def query(self) -> bool:
        state().not_while_capturing("Event.query")
        self.known = True
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Stream:
    """A stream: kernels run at the call, so there is nothing to order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device, self.priority = DEVICE, priority
        self.cuda_stream = self.stream_id = id(self)
        self._before: list[Any] = []

    def synchronize(self) -> None:
        state().host_waits("Stream.synchronize")

    def query(self) -> bool:
        state().not_while_capturing("Stream.query")
        return True

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        set_stream(self._before.pop())


_DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(state().streams, "current", _DEFAULT)


def set_stream(stream: Any) -> None:
    if stream is not None:
        state().streams.current = stream


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    with stream if stream is not None else contextlib.nullcontext():
        yield


class _NoContext(contextlib.nullcontext[None]):
    """Of torch.cuda.device: there is one device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Generators:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> torch.Generator:
        return torch.default_generator


def _always(value: Any) -> Callable[..., Any]:
    """A separate function each time: dynamo refuses one that stands for several of torch."""
    return lambda *args, **kwargs: value


def _nothing() -> Callable[..., Any]:
    return _always(None)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _synchronize(device: Any = None) -> None:
    state().host_waits("torch.cuda.synchronize")


def _is_capturing() -> bool:
    return state().capture is not None


_RANDOM: dict[str, Any] = {
    "manual_seed": lambda seed: _seed(seed),
    "manual_seed_all": lambda seed: _seed(seed),
    "seed": _nothing(),
    "initial_seed": lambda: torch.initial_seed(),
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
}
_CUDA: dict[str, Any] = {
    **_RANDOM,
    "is_available": _always(True),
    "is_initialized": _always(True),
    "_lazy_init": _nothing(),
    "_lazy_call": lambda function, **kwargs: function(),
    "init": _nothing(),
    "device_count": _always(1),
    "current_device": _always(0),
    "set_device": _nothing(),
    "device": _NoContext,
    "device_of": _NoContext,
    "get_device_properties": _always(PROPERTIES),
    "get_device_capability": _always((PROPERTIES.major, PROPERTIES.minor)),
    "get_device_name": _always(PROPERTIES.name),
    "is_bf16_supported": _always(True),
    "default_generators": _Generators(),
    "synchronize": _synchronize,
    "Event": Event,
    "Stream": Stream,
    "stream": stream_context,
    "current_stream": current_stream,
    "default_stream": _always(_DEFAULT),
    "set_stream": set_stream,
    "is_current_stream_capturing": _is_capturing,
    "CUDAGraph": CUDAGraph,
    "graph": capture_of,
    "graph_pool_handle": graph_pool_handle,
    "empty_cache": _nothing(),
    "mem_get_info": _always((MEMORY, MEMORY)),
    "reset_peak_memory_stats": _nothing(),
    **{f"{what}memory_{kind}": _always(0) for what in ("", "max_") for kind in ("allocated", "reserved")},
}
_SUBSTITUTES: dict[str, dict[str, Any]] = {
    "torch.cuda": _CUDA,
    "torch.cuda.random": _RANDOM,
    "torch.cuda.streams": {"Event": Event, "Stream": Stream},
    "torch.cuda.graphs": {
        "is_current_stream_capturing": _is_capturing,
        "CUDAGraph": CUDAGraph,
        "graph": capture_of,
        "graph_pool_handle": graph_pool_handle,
    },
    "torch.cuda.nvtx": {name: _nothing() for name in ("range_push", "range_pop", "mark")},
    IN_C: {
        "_cuda_setRNGState": lambda new_state: torch.set_rng_state(new_state),
        "_cuda_isCurrentStreamCapturing": lambda: state().capture is not None,
    },
}


# Classes of megatron-core that keep a stream for all of their instances, once they have made one.
_KEPT_STREAMS = (
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher", "cuda_dtoh_stream"),
    ("megatron.core.transformer.moe.shared_experts", "SharedExpertMLP", "stream"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention", "cp_stream"),
)


@contextlib.contextmanager
def streams_made_anew() -> Iterator[None]:
    """Streams that were made before, such as those of `megatron_on_cpu`, do not count; and none stays afterwards."""
    before = {owner: vars(owner)[name] for owner, name in _keeping_streams()}
    for owner, name in _keeping_streams():
        setattr(owner, name, None)
    try:
        yield
    finally:
        for owner, name in _keeping_streams():
            setattr(owner, name, before.get(owner))


def _keeping_streams() -> Iterator[tuple[type, str]]:
    for module, cls, name in _KEPT_STREAMS:
        owner = getattr(sys.modules.get(module), cls, None)
        if isinstance(owner, type) and name in vars(owner):
            yield owner, name


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """torch.cuda as it is with one GPU, for all threads of the process."""
    with contextlib.ExitStack() as undo:
        for module, names in _SUBSTITUTES.items():
            owner = import_module(module)
            for name, value in names.items():
                if name in vars(owner):
                    undo.callback(setattr, owner, name, vars(owner)[name])
                else:
                    undo.callback(delattr, owner, name)
                setattr(owner, name, value)
        yield
