"""Run an unmodified megatron-core on CPU, with substitutes for the few CUDA entry points it needs."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from shim.ops._storage import copy_storage

__all__ = [
    "SUBSTITUTIONS",
    "NoEvent",
    "Substitution",
    "megatron_on_cpu",
    "storage_shared_in_python",
    "torch_norm_under_sequence_parallelism",
    "type_on_a_gpu",
    "unwritten_memory_is_nan",
]


class Substitution(NamedTuple):
    """One attribute that replaces its CUDA original while `megatron_on_cpu` is active."""

    owner: str  # "module" or "module:Class"
    name: str
    build: Callable[[Any], Any]  # original attribute -> substitute
    reason: str


class NoEvent:
    """An event that has happened: CPU kernels run at the call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _NoStream:
    """A stream without work to order: CPU kernels run at the call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> NoEvent:
        return NoEvent()


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _cpu_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _no() -> bool:
    return False


def _no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


# gloo refuses parts of different sizes, which NCCL takes. Experts that are cut over tensor-parallel ranks send them.


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if async_op or len({part.shape for part in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(map(len, tensor_list)), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for part, found in zip(tensor_list, gathered):
            part.copy_(found[: len(part)])
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(
        output: Any,
        input_list: Any,
        op: Any = torch.distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or len({part.shape for part in input_list}) == 1:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(input_list)
        torch.distributed.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(part) for part in input_list])[torch.distributed.get_rank(group)])
        return None

    return reduce_scatter


def _norm_under_sequence_parallelism(original: Callable[..., Any]) -> staticmethod[..., Any]:
    """The torch norm refuses sequence parallelism only because its weights lack the mark. Sets the mark."""

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm = original(cls, accepted, *args, **kwargs)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


_RANDOM = "megatron.core.tensor_parallel.random"
_FLAGOS = "megatron.plugin.platform.platform_cpu:PlatformCPU"  # only in that fork
SUBSTITUTIONS = (
    Substitution("torch.cuda", "current_device", lambda _: _cpu_device, "the device= of nearly every buffer"),
    Substitution("torch.cuda", "manual_seed", lambda _: torch.manual_seed, "model_parallel_cuda_manual_seed"),
    Substitution("torch.cuda", "initial_seed", lambda _: torch.initial_seed, "the RNG of mixed hidden states"),
    Substitution("torch.cuda", "get_rng_state", lambda _: _cpu_rng_state, "the RNG tracker's add()"),
    Substitution("torch.cuda.random", "get_rng_state", lambda _: _cpu_rng_state, "the RNG tracker's fork()"),
    Substitution(_RANDOM, "_set_cuda_rng_state", lambda _: _set_cpu_rng_state, "the RNG tracker's setter"),
    Substitution("torch.cuda", "synchronize", lambda _: _nothing, "pipeline communication, process groups"),
    Substitution("torch.cuda", "current_stream", lambda _: _NoStream, "pipeline schedules"),
    Substitution("torch.cuda", "Stream", lambda _: _NoStream, "pipeline schedules, gradient buffers"),
    Substitution("torch.cuda", "stream", lambda _: _no_context, "pipeline schedules, gradient buffers"),
    Substitution("torch.cuda", "Event", lambda _: NoEvent, "timers, and offloading of activations"),
    Substitution("torch.cuda", "is_current_stream_capturing", lambda _: _no, "what must not run in a CUDA graph"),
    Substitution("torch.distributed", "all_gather", _all_gather, "experts cut over tensor-parallel ranks"),
    Substitution("torch.distributed", "reduce_scatter", _reduce_scatter, "experts cut over tensor-parallel ranks"),
    Substitution(_FLAGOS, "current_device", lambda _: lambda _: _cpu_device(), "the device= of nearly every buffer"),
    Substitution(_FLAGOS, "Stream", lambda _: _NoStream, "the layers of a mixture of experts"),
    Substitution(_FLAGOS, "Event", lambda _: NoEvent, "offloading of activations"),
    Substitution(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        _norm_under_sequence_parallelism,
        "the only norm without Apex and TE asserts against sequence parallelism",
    ),
)


def _is_a_gpu(device: Any) -> bool:
    """Whether an argument names a GPU. A number without a name does, also as the text of an environment variable."""
    if isinstance(device, (str, torch.device)):
        return str(device).startswith("cuda") or str(device).isdigit()
    return type(device) is int


class _CudaMeansCpu(TorchFunctionMode):
    """Substitutes for calls that no attribute covers: device="cuda", .cuda(), .to("cuda") and pin_memory=True."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_a_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        if kwargs:
            if _is_a_gpu(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def _resolve(owner: str) -> Any:
    """The owner of an attribute; None for a module that only a fork has."""
    module, _, attribute = owner.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError:
        if owner != _FLAGOS:
            raise
        return None
    return getattr(found, attribute) if attribute else found


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let the calling thread run megatron-core 0.12 to 0.20 without a GPU; everything is undone on exit.

    Substitutes `SUBSTITUTIONS` (process-wide) and enters a torch function mode (this thread only) that turns
    literal CUDA devices into CPU. May be nested; code compiled with torch.compile traces through it. Nothing is
    compiled in C++ either, see `storage_shared_in_python`.

    Raises ImportError if megatron-core cannot be imported.
    """
    with _substituted(SUBSTITUTIONS), storage_shared_in_python(), _CudaMeansCpu():
        yield


@contextlib.contextmanager
def torch_norm_under_sequence_parallelism() -> Iterator[None]:
    """Lets layers without Apex and Transformer Engine use sequence parallelism, on any device."""
    with _substituted([each for each in SUBSTITUTIONS if each.build is _norm_under_sequence_parallelism]):
        yield


@contextlib.contextmanager
def _substituted(substitutions: Sequence[Substitution]) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for owner_name, name, build, _reason in substitutions:
            owner = _resolve(owner_name)
            if owner is None:
                continue
            original = vars(owner)[name]
            # A static method is restored as the descriptor that the class holds.
            callable_original = original.__func__ if isinstance(original, staticmethod) else original
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, build(callable_original))
        yield


_type = torch.Tensor.type


def type_on_a_gpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The name of a tensor's type, as it is on a GPU: for Tensor.type, which the distributed optimizer asks."""
    found = _type(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and ".cuda." not in found else found


def optimizer_on_cpu(config: Any, model_chunks: Sequence[Any]) -> Any:
    """get_megatron_optimizer(config, model_chunks) as on a GPU, without groups of gloo beside those of the ranks.

    Its step also asks for types: run it under mock.patch.object(torch.Tensor, "type", type_on_a_gpu).
    """
    make = import_module("megatron.core.optimizer").get_megatron_optimizer
    gloo = "use_gloo_process_groups"
    known = inspect.signature(make).parameters
    with mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
        return make(config, model_chunks, **({gloo: False} if gloo in known else {}))


@contextlib.contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """torch fills memory that it does not initialise with NaN, and not with what happens to lie there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def storage_shared_in_python() -> Iterator[None]:
    """From 0.17 outputs are refilled by a C++ helper that is compiled on first use, for half a minute. Spare that.

    torch locks the directory in which it compiles. A process that is killed meanwhile leaves the lock, and each later
    one waits for it without an end.
    """
    random = import_module("megatron.core.tensor_parallel.random")
    if not hasattr(random, "_get_share_storage"):
        yield
        return
    # In the place of what is compiled, so that the function that asks for it stays upstream's.
    with mock.patch.object(random, "_share_storage_ext", SimpleNamespace(share_storage=copy_storage)):
        yield
