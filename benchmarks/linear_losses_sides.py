"""The sides that benchmarks/linear_losses.py compares, and counting without memory.

A side is a function (hidden [T, 1, H], weight [V / ranks, H], target [T, 1]) -> losses [T, 1].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import logprob_peers
import torch
import torch.distributed as dist
from torch import Tensor

from shim import testing
from shim.ops import _logprob_linear
from shim.testing import Footprint
from shim.testing.pretend_cuda.traffic import moved

Side = Callable[[Tensor, Tensor, Tensor], Tensor]
STOCK, PATCH = "megatron-core", "shim, the patch"


class Counted(Footprint):
    """A footprint that also knows the products (in multiply-adds), the launches and the bytes moved.

    A launch is an operation that reads or writes memory, or a Triton kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.bytes_moved = self.torch = self.triton = self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.reads += 1
            if args[0].is_meta:
                return 1  # it has no value
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if name in ("mm", "addmm", "addmm_", "bmm"):
            left, right = [value for value in args if torch.is_tensor(value)][-2:]
            self.products += left.numel() * right.size(-1)
        sizes = [size for size, _ in moved(function, args, kwargs or {}, result)]
        self.bytes_moved += sum(sizes)
        self.torch += bool(sizes)
        return result

    def triton_kernel(self, size: int) -> None:
        self.triton += 1
        self.bytes_moved += size


class _Kernel:
    """In the place of a Triton kernel: it is counted, and nothing runs. `size`: the bytes that a launch moves."""

    def __init__(self, size: Callable[..., int]) -> None:
        self.size = size
        self.watching: Counted | None = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if self.watching is not None:
                self.watching.triton_kernel(self.size(*args, **kwargs))

        return launch


def _of_liger(*, X_ptr: Tensor, HAS_GRADIENTS: bool, **_: Any) -> int:
    return X_ptr.nbytes * (3 if HAS_GRADIENTS else 1)  # read; with gradients read once more, and written


@contextlib.contextmanager
def kernels_on_meta(watching: Counted) -> Iterator[None]:
    """Triton kernels of shim and of Liger are counted. Messages do not happen: there is one rank."""
    with contextlib.ExitStack() as stack:
        put = functools.partial(_put, stack)
        put(dist, "all_reduce", lambda *_, **__: None)
        put(dist, "reduce_scatter", lambda out, parts, *_, **__: out.copy_(parts[0]))
        try:
            from shim.ops import _logprob_triton as kernels
        except ImportError:
            pass
        else:
            put(_logprob_linear, "passes_for", lambda x: kernels)
            put(kernels, "_statistics_kernel", _watched(watching, lambda x, *_, **__: x.nbytes))
            put(kernels, "_gradient_kernel", _watched(watching, lambda x, out, *_, **__: x.nbytes + out.nbytes))
        with contextlib.suppress(ImportError):
            from liger_kernel.ops import fused_linear_cross_entropy as liger

            put(liger, "liger_cross_entropy_kernel", _watched(watching, _of_liger))
        yield


def _put(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _watched(watching: Counted, size: Callable[..., int]) -> _Kernel:
    kernel = _Kernel(size)
    kernel.watching = watching
    return kernel


def count_on_meta(side: Side, tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> Counted:
    """Forward and backward of the summed losses, on tensors that have no memory."""
    hidden = torch.empty(tokens, 1, width, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, width, dtype=dtype, device="meta", requires_grad=True)
    target = torch.zeros(tokens, 1, dtype=torch.int64, device="meta")
    counted = Counted()
    with kernels_on_meta(counted), torch.compiler.set_stance("force_eager"), counted:
        losses = side(hidden, weight, target)
        gradients = torch.autograd.grad(losses.sum(), [hidden, weight])
        del losses, gradients
    return counted


def head_of_model(width: int, vocabulary: int, **options: Any) -> Any:
    """A model of the release, for its output layer and its loss. The layer's own weight is not used."""
    model = testing.build_gpt(
        vocab_size=8,
        num_layers=1,
        mtp_num_layers=None,
        share_embeddings_and_output_weights=False,
        hidden_size=width,
        ffn_hidden_size=8,
        **options,
    )
    layer = model.output_layer
    ranks = dist.get_world_size()
    layer.output_size, layer.output_size_per_partition = vocabulary, vocabulary // ranks
    return model


def of_megatron(width: int, vocabulary: int, **options: Any) -> dict[str, Side]:
    """Stock's way, with either of its cross entropies, and the patch, which must be applied with `fuse`."""
    from shim.patches.megatron_core._linear_losses import Head
    from shim.patches.megatron_core._promised_logits import Promise

    models = {fused: head_of_model(width, vocabulary, cross_entropy_loss_fusion=fused, **options) for fused in (0, 1)}

    def stock(h: Tensor, w: Tensor, t: Tensor, fused: int = 0) -> Tensor:
        logits, _ = models[fused].output_layer(h, weight=w)
        losses: Tensor = models[fused].compute_language_model_loss(t.t(), logits)
        return losses.t()

    def patch(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        promise = Promise.of(Head(models[0].output_layer, w, h))
        losses: Tensor = models[0].compute_language_model_loss(t.t(), promise)
        return losses.t()

    return {STOCK: stock, "megatron-core, fused": functools.partial(stock, fused=1), PATCH: patch}


def of_peers(ranks: int, device: str, chunk: int) -> tuple[dict[str, Side], dict[str, str]]:
    """Those of logprob_peers, and package -> why it is not here."""
    found = logprob_peers.find(ranks, device, chunk)

    def losses_of(function: Any) -> Side:
        return lambda h, w, t: -function(h, w, t)

    return {name: losses_of(function) for name, function in found.linear.items()}, found.missing


def resident(field: str = "VmRSS", reset: bool = False) -> int:
    """Bytes of this process in memory, now or ("VmHWM") at most since the last reset. Linux only."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def exact(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Losses, and the gradients of their sum, by plain autograd in fp64."""
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = leaves[0] @ leaves[1].t()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return losses.detach().view_as(target), list(torch.autograd.grad(losses.sum(), leaves))


def step(side: Side, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    losses = side(*leaves, target)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaves)


def errors(found: tuple[Tensor, tuple[Tensor, ...]], right: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """The largest error of a loss, and the largest error of a gradient in parts of its norm."""
    of_loss = (found[0].double() - right[0]).abs().max().item()
    return of_loss, max(float((mine.double() - true).norm() / true.norm()) for mine, true in zip(found[1], right[1]))
