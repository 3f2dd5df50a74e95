"""Proofs of te-grouped-linear-graphs.

The module and its Python code are Transformer Engine's. Torch stands in for its kernels, and Graph for a CUDA graph:
it writes down the calls of these kernels in a capture, and a replay runs them again on the same memory, as a GPU does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.fp8 import state_manager
from shim.testing.fp8_layer import OnGpu, fp8_region, fresh_fp8_state
from shim.testing.proof import CannotRunError, Here, proof
from shim.testing.transformer_engine import compiled_ops

EXPERTS, SIZE, TOKENS = 2, 16, 16  # an expert is [SIZE, SIZE], and gets so many tokens
MICROBATCHES = 3
E4M3 = torch.float8_e4m3fn  # the values here are small whole numbers, which it holds exactly


class Graph:
    """Kernels that torch computes, and the calls of them that a capture has written down."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.capturing = False

    def launch(self, kernel: Callable[..., None], *args: Any) -> None:
        kernel(*args)
        if self.capturing:
            self.calls.append((kernel, args))

    def replay(self) -> None:
        for kernel, args in self.calls:
            kernel(*args)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                yield
        finally:
            self.capturing = False

    # The operations of the compiled part that the module calls, with its arguments.

    def quantize(self, source: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
        if output is None:
            empty = torch.empty(source.shape, dtype=torch.uint8)
            output = quantizer.create_tensor_from_data(empty, fake_dtype=source.dtype)
        self.launch(round_to_e4m3, source.detach(), output._data.detach(), noop)
        return output

    def split_quantize(self, source: Tensor, splits: list[int], quantizers: Sequence[Any], **other: Any) -> Any:
        parts = zip(torch.split(source, splits), quantizers, strict=True)
        return [self.quantize(part, quantizer) for part, quantizer in parts]

    def te_general_grouped_gemm(self, *args: Any) -> Any:
        left, transpose_left, right, transpose_right, outputs, _, splits, bias, _, single, _, _, _, _, accumulate = (
            args[:15]
        )
        outputs = torch.split(outputs[0], splits) if single else outputs
        for a, b, output in zip(left, right, outputs, strict=True):
            a, b = a._data.detach(), b._data.detach()  # the module frees its tensors, and a graph keeps its memory
            self.launch(multiply, a, transpose_left, b, transpose_right, output.detach(), accumulate)
        return bias

    def operations(self) -> dict[str, Callable[..., Any]]:
        names = ("quantize", "split_quantize", "te_general_grouped_gemm")
        return {name: getattr(self, name) for name in names}


def round_to_e4m3(source: Tensor, data: Tensor, noop: Tensor | None) -> None:
    if noop is None or not noop.item():
        data.copy_(source.to(E4M3).view(torch.uint8))


def multiply(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool, output: Tensor, accumulate: bool) -> None:
    a, b = a.view(E4M3).float(), b.view(E4M3).float()
    product = (b.t() if transpose_b else b) @ (a.t() if transpose_a else a)
    output.copy_(output + product if accumulate else product)


@contextlib.contextmanager
def kernels_of(graph: Graph) -> Iterator[None]:
    """Inside, modules of Transformer Engine can be made and run, and the graph computes what they launch."""
    if not hasattr(import_module("transformer_engine_torch"), "split_quantize"):
        raise CannotRunError("Transformer Engine before 2.5 launches other kernels")
    with (
        testing.te_cuda_stand_ins(),
        compiled_ops(graph.operations()),
        fresh_fp8_state(),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
        mock.patch.object(torch.cuda, "device", lambda *args: contextlib.nullcontext()),
    ):
        yield


def experts() -> Any:
    """Two experts whose weights are ones, and add their gradients to main_grad."""
    te: Any = import_module("transformer_engine.pytorch")
    how = {"bias": False, "params_dtype": torch.float32, "device": "cpu", "fuse_wgrad_accumulation": True}
    layer = te.GroupedLinear(EXPERTS, SIZE, SIZE, **how)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(SIZE, SIZE)
    fill(layer, 1.0)
    return layer


def fill(layer: Any, value: float) -> None:
    """As an optimizer step: other weights, and no gradients."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
            parameter.main_grad.zero_()


def forward(layer: Any, first: bool | None) -> Tensor:
    """Of one microbatch of ones, [EXPERTS * TOKENS, SIZE]."""
    recipe: Any = import_module("transformer_engine.common.recipe")
    values = torch.ones(EXPERTS * TOKENS, SIZE, requires_grad=True)
    with fp8_region(recipe.Float8CurrentScaling()):
        output: Tensor = layer(values.as_subclass(OnGpu), [TOKENS] * EXPERTS, is_first_microbatch=first)
    return output.as_subclass(Tensor)


def new_flag() -> Tensor:
    """The tensor by which replays keep the quantized weights, as an FP8 graph has it. fresh_fp8_state drops it."""
    state = getattr(state_manager(), "quantization_state", state_manager())  # its place from 2.15
    state.skip_fp8_weight_update_tensor = torch.zeros(1)
    flag: Tensor = state.skip_fp8_weight_update_tensor
    return flag


def trained(first: bool | None) -> tuple[float, float]:
    """The output of an expert, and its gradient, after a step of several microbatches by replays of one graph.

    The graph is captured with is_first_microbatch=first, when weights are ones. The step has weights of two.
    """
    graph = Graph()
    with kernels_of(graph):
        layer = experts()
        forward(layer, first if first is None else True).sum().backward()  # a warm-up quantizes weights, and keeps them
        flag = new_flag()
        with graph.capture():
            output = forward(layer, first)
            output.sum().backward()
        fill(layer, 2.0)
        for microbatch in range(MICROBATCHES):
            flag.fill_(microbatch > 0)
            graph.replay()
    return float(output.detach()[0, 0]), float(next(layer.parameters()).main_grad[0, 0])


def output_off(first: bool | None) -> float:
    return abs(trained(first)[0] / (2 * SIZE) - 1)


def gradient_off(first: bool | None) -> float:
    return abs(trained(first)[1] / (MICROBATCHES * TOKENS) - 1)


@proof("outputs off by {:.0%}", right="outputs of the new weights", te=True)
def a_replay_quantizes_new_weights(here: Here) -> float:
    """Replays of an FP8 CUDA graph use weights of GroupedLinear from before its capture.

    To reproduce: in an FP8 region, call `te.GroupedLinear(...)` once with is_first_microbatch=True, and capture a
    second call, with is_first_microbatch=False, in a CUDA graph. Before the capture call
    `FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)`, as make_graphed_callables does with
    cache_quantized_params=True. Change the weights, set the flag to False again, and replay. Compare the output with
    that of an eager call. Here the weights are doubled.

    Linear quantizes the new weights in this replay. GroupedLinear has passed None for the flag since 2.10. Fixed in
    2.17 (pull requests 3052 and 3065). Here torch stands in for the kernels, and a list of their calls for the graph.
    """
    return float(here.run(output_off, False)[0])


@proof("gradients off by {:.0%}", right="gradients of all microbatches", te=True)
def replays_add_their_gradients(here: Here) -> float:
    """Replays of an FP8 CUDA graph keep the gradient of the last microbatch alone, of weights of GroupedLinear.

    To reproduce: make `te.GroupedLinear(..., fuse_wgrad_accumulation=True)` with `main_grad` of zeros, and capture its
    forward and backward pass with is_first_microbatch=True, under FP8 and with the flag of
    `FP8GlobalStateManager.set_skip_fp8_weight_update_tensor`. make_graphed_callables captures TEGroupedLinear of
    megatron-core so. Replay for three microbatches. Right is the sum of three gradients, as Linear has it.

    Wrong from 2.10 on. Fixed in 2.17 (pull requests 3052 and 3065). Here torch stands in for the kernels, and a list of
    their calls for the graph.
    """
    return float(here.run(gradient_off, True)[0])
