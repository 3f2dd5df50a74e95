"""An optimizer that is offloaded to the CPU, for proofs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shim._torch_names import required

_ON_HOST = "_on_host"
_IS_CUDA = required("torch:_C.TensorBase.is_cuda").__get__


class Devices(TorchFunctionMode):
    """A GPU and a host, both on the CPU: tensors are on the GPU, unless they were made or copied to be on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args and isinstance(args[0], Tensor) else None
        on_host = hasattr(first, _ON_HOST)
        if func == _IS_CUDA:
            return not on_host
        if func is Tensor.pin_memory:
            return first
        if func is Tensor.type and len(args) == 1:
            return func(first).replace("torch.", "torch." if on_host else "torch.cuda.")
        device = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func, "")
        if func is Tensor.to and len(args) == 2:
            device = str(args[1])
        if device.startswith(("cpu", "cuda")):
            if on_host == device.startswith("cpu"):
                return first
            with required("torch:_C.DisableTorchFunction")():
                copied = args[0].clone()
            return self._on_host(copied) if device.startswith("cpu") else copied
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result is not first and (on_host or (first is None and _for_host(kwargs))):
            self._on_host(result)
        return result

    @staticmethod
    def _on_host(tensor: Tensor) -> Tensor:
        setattr(tensor, _ON_HOST, True)
        return tensor


def _for_host(kwargs: dict[str, Any]) -> bool:
    return str(kwargs.get("device")) == "cpu"


class Event:
    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class Stream:
    """A stream without work to order: CPU kernels run at the call."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()


@contextlib.contextmanager
def offloading(te: bool = True) -> Iterator[None]:
    """Inside, a CPU is a GPU and a host. te: whether Transformer Engine or Apex counts as installed."""
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", Stream),
        (torch.cpu, "Stream", Stream),
        (torch.cpu, "stream", lambda stream: contextlib.nullcontext()),
        (distrib_optimizer, "HAVE_APEX_OR_TE", te),
        (optimizer_config, "is_te_min_version", lambda *args, **kwargs: True),  # asked of TE that is not there
        (distrib_optimizer, "quantize_param_shard", lambda *args, **kwargs: None),  # 0.12 needs TE, also without FP8
        (numpy, "product", numpy.prod),  # the sharding of releases up to 0.15 is written for numpy 1
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, value in stand_ins:
            undo.enter_context(mock.patch.object(owner, name, value, create=True))
        undo.enter_context(Devices())
        yield


def take_step(model: Any, optimizer: Any, number: int, rows: int = 1) -> None:
    """A step of a model in DDP, on rows of 16 tokens that belong to its number; every rank has the same."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    row = torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(number))
    model(row, torch.arange(16)[None], None, labels=row).float().mean().backward()
    model.finish_grad_sync()
    optimizer.step()
