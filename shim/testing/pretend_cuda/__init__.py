"""A CUDA that is pretended on a CPU: whole training steps whose tensors lie on the CPU and whose device says cuda:0.

A step on a CPU does not show what costs most on a GPU: that the host waits for the device, copies that block, small
kernels, and tensors on the wrong device. Here it does, without a GPU and without CUDA:

    from shim import testing
    from shim.testing import pretend_cuda

    with pretend_cuda.cuda_pretended(), testing.layout_initialised(testing.Layout()):
        model = testing.build_gpt().cuda()
        ids = torch.arange(32, device="cuda")[None]
        with pretend_cuda.counted() as counts:
            model(ids, ids, None, labels=ids).mean().backward()
    assert not counts.host_reads, counts.told("host_reads")

A tensor of the CPU beside one of the device raises DeviceFaultError, as CUDA raises. Backward runs in a thread of the
device, as autograd runs it for a GPU, so thread-local state of the caller is not there. Triton kernels are interpreted.
torch.cuda.graph captures and replays: what is not permitted while capturing raises CaptureError. Collectives run over
gloo, and what NCCL would refuse of them is counted.

Not shown: time, memory of the device, the order of streams, and kernels that are written in CUDA. An operation counts
as one launch if it touches memory, although some are several kernels of CUDA and some functions are compiled into one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from shim._torch_names import required
from shim.ops import _checks

from .backward import THREAD, backward_in_a_thread
from .compiling import run_as_they_are
from .counts import Counts, Event, uncounted
from .interception import Intercepting
from .kernels import kernels_interpreted
from .moving import module_moves, moved_to_device
from .operations import Dispatching
from .runtime import streams_made_anew, substituted
from .state import _STATE, CaptureError, DeviceFaultError, State, state
from .tensor import DEVICE, DeviceTensor, values_of

__all__ = [
    "DEVICE",
    "THREAD",
    "CaptureError",
    "Counts",
    "DeviceFaultError",
    "DeviceTensor",
    "Event",
    "counted",
    "cuda_pretended",
    "moved_to_device",
    "uncounted",
    "values_of",
]


@contextlib.contextmanager
def cuda_pretended() -> Iterator[None]:
    """Let this thread, and backward, use a pretended GPU; everything is undone on exit.

    torch.cuda says for the whole process that there is one GPU. Tensors of the device are made by device="cuda",
    .cuda() and so on. nn.Module.cuda moves modules, with the attributes of their weights. What torch.compile would
    compile runs as it is. May not be nested, also not in `megatron_on_cpu`, which turns CUDA into the CPU.

    Raises RuntimeError inside another one, or inside `megatron_on_cpu`.
    """
    if _STATE or required("torch.overrides:_get_current_function_mode_stack")():
        raise RuntimeError("cuda_pretended: leave the other pretended device, or megatron_on_cpu, first")
    with contextlib.ExitStack() as undo:
        _STATE.append(State())
        undo.callback(_STATE.clear)
        undo.enter_context(run_as_they_are())
        undo.enter_context(substituted())
        undo.enter_context(streams_made_anew())
        undo.enter_context(_lifted_from_the_cpu())
        undo.enter_context(module_moves())
        undo.enter_context(kernels_interpreted())
        undo.enter_context(mock.patch.object(_checks, "PLAIN", (*_checks.PLAIN, DeviceTensor)))
        undo.enter_context(backward_in_a_thread(_modes))
        undo.enter_context(_modes())
        yield


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count the events of all threads inside a `cuda_pretended`. May be nested: each counts all that is inside it."""
    counts = Counts()
    state().counts.append(counts)
    try:
        yield counts
    finally:
        state().counts.remove(counts)


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    with Intercepting(), Dispatching():
        yield


@contextlib.contextmanager
def _lifted_from_the_cpu() -> Iterator[None]:
    """Let torch make tensors of data on the CPU, and copy them by an operation that can be seen."""
    choose = required("torch:_C._set_only_lift_cpu_tensors")
    before = required("torch:_C._only_lift_cpu_tensors")()
    choose(True)
    try:
        yield
    finally:
        choose(before)
