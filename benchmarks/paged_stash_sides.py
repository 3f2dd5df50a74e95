"""The sides that benchmarks/paged_stash.py compares: stock autograd, megatron-core's paged stash, and shim's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shim.testing import Footprint, megatron_on_cpu
from shim.testing.pretend_cuda.traffic import moved

ROWS, HIDDEN, FFN, LAYERS, MICROBATCHES = 1024, 256, 128, 4, 8
UPSTREAM = "megatron.core.transformer.moe.paged_stash"


class Watching(Footprint):
    """A footprint that also knows the held bytes, the restored part of them, and the operations outside kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.launches = self.traffic = self.restored = self.most_restored = 0
        self._in_kernel = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_kernel:
            return function(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(function, types, args, kwargs)
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith(("empty", "new_empty", "detach", "lift_fresh")):
            self.operations += 1
        self.traffic += sum(size for size, _ in moved(function, args, kwargs or {}, result))
        return result

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        self.launches += 1
        self._in_kernel = True
        try:
            yield
        finally:
            self._in_kernel = False

    def note_restored(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._restore(storage.nbytes())
        weakref.finalize(storage, self._restore, -storage.nbytes())

    def _restore(self, size: int) -> None:
        self.restored += size
        self.most_restored = max(self.most_restored, self.restored)

    def work(self) -> tuple[int, int, int]:
        return self.operations, self.launches, self.traffic

    def forget_peaks(self) -> None:
        self.peak_bytes, self.most_restored = self.held_bytes, self.restored


# The model


class GatedExperts(torch.autograd.Function):
    """silu(x @ w1) * (x @ w1) @ w2 of the first `count` rows: like a grouped product, it reads no other row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, w1: Tensor, w2: Tensor) -> Tensor:
        product, gated = x.new_empty(ROWS, 2 * FFN), x.new_empty(ROWS, FFN)
        torch.mm(x[:count], w1, out=product[:count])
        gate, up = product[:count].chunk(2, -1)
        torch.mul(torch.nn.functional.silu(gate), up, out=gated[:count])
        output = torch.zeros_like(x)  # another layer may have more tokens
        torch.mm(gated[:count], w2, out=output[:count])
        for saved in (x, product, gated):
            saved.grouped_tensor_scale_inv = False  # Transformer Engine's mark, without which upstream stashes nothing
        ctx.save_for_backward(x, product, gated, w1, w2)
        ctx.count = count
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, product, gated, w1, w2 = ctx.saved_tensors
        x, product, gated, grad = (tensor[: ctx.count] for tensor in (x, product, gated, grad))
        gate, up = product.chunk(2, -1)
        grad_gated = grad @ w2.t()
        grad_gate = torch.ops.aten.silu_backward(grad_gated * up, gate)
        grad_product = torch.cat([grad_gate, grad_gated * torch.nn.functional.silu(gate)], -1)
        grad_x = x.new_zeros(ROWS, HIDDEN)
        torch.mm(grad_product, w1.t(), out=grad_x[: ctx.count])
        return grad_x, None, x.t() @ grad_product, gated.t() @ grad


class Experts(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.w1 = torch.nn.Parameter(torch.randn(HIDDEN, 2 * FFN) / HIDDEN**0.5)
        self.w2 = torch.nn.Parameter(torch.randn(FFN, HIDDEN) / FFN**0.5)

    def forward(self, x: Tensor, count: int) -> Tensor:
        return GatedExperts.apply(x, count, self.w1, self.w2)


def build(config: Any) -> list[Experts]:
    torch.manual_seed(0)
    layers = [Experts(config) for _ in range(LAYERS)]
    for layer in layers:
        for weight in layer.parameters():
            weight.grad = torch.zeros_like(weight)
    return layers


def settings(page_size: int) -> Any:
    """The config that both read. Negative: as many pages as there were tokens for."""
    return SimpleNamespace(
        moe_paged_stash=True,
        moe_paged_stash_page_size=page_size,
        moe_paged_stash_buffer_size_factor_cuda=-1.0,
        moe_paged_stash_buffer_size_factor_cpu=0.0,
    )


# The three


class Stock:
    """Autograd keeps the buffers."""

    def begin(self) -> None: ...

    def microbatch(self) -> None: ...

    def layer(self, experts: Experts, x: Tensor, count: int, expected: int) -> Tensor:
        return experts(x, count)

    def close(self) -> None: ...


class Shim(Stock):
    """The patch's part of upstream's calls. It needs no megatron-core."""

    def __init__(
        self, config: Any, watching: Watching, ahead: int = 0, backend: str | None = None, masked: bool = False
    ) -> None:
        from shim.ops import _stash_eager
        from shim.ops import paged_stash as ops
        from shim.patches.megatron_core.paged_stash.experts import ExpertStash

        self.config, self.watching = config, watching
        self.stash = ExpertStash({**vars(config), "overflow": "keep"})
        self.masked = masked
        self._undo = contextlib.ExitStack()
        inner = self.stash._stash_of(None, self.stash.settings(config))
        inner.backend = backend
        if ahead:
            # The flags of a layer are known when so many more are on their way.
            late = lambda _: len(inner._unsettled) > ahead  # noqa: E731
            self._replace(ops._Unsettled, "is_known", late)
        if backend is None:
            for name in ("allocate", "store", "load", "release"):
                self._replace(_stash_eager, name, self._kernel(getattr(_stash_eager, name), name == "load"))

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)

    def _kernel(self, function: Callable[..., Any], restores: bool) -> Callable[..., Any]:
        def launch(pool: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if restores:
                self.watching.note_restored(tensor)
            with self.watching.kernel():
                return function(pool, tensor, *args, **kwargs)

        return launch

    def begin(self) -> None:
        self.stash.step_begins(True, self.config)

    def layer(self, experts: Experts, x: Tensor, count: int, expected: int) -> Tensor:
        outer = self.stash.enter_module(experts)
        valid = torch.arange(ROWS) < count if self.masked else torch.tensor(count)
        with self.stash.open(ROWS, valid, expected):
            output = experts(x, count)
        self.stash.commit(output)
        self.stash.leave_module(outer)
        return output

    def pools(self) -> list[Any]:
        return [pool for stash in self.stash._all() for pool in stash.pools.values() if pool.pages]

    def wanted_bytes(self) -> int:
        return sum(use.wanted * use.page_size * use.width * 4 for use in self.stash.statistics().pools)

    def close(self) -> None:
        self._undo.close()


class Upstream(Stock):
    """megatron-core's manager. factor: of the tokens that there were, so that it gets the pages that it should have."""

    def __init__(self, config: Any, watching: Watching, factor: float = 1.0) -> None:
        self.module = import_module(UPSTREAM)
        self.module.PagedStashManager.STASH_MGR = None
        self.config, self.watching = config, watching
        config.moe_paged_stash_buffer_size_factor_cuda = -factor

    def begin(self) -> None:
        self.module.paged_stash_reset(enabled=True, config=self.config)

    def microbatch(self) -> None:
        self.module.paged_stash_init_chunk_handler(None, None)

    def layer(self, experts: Experts, x: Tensor, count: int, expected: int) -> Tensor:
        x = self.module.paged_stash_group_start(x)
        with self.module.get_paged_stash_context(
            name="experts", max_num_tokens=ROWS, num_tokens_tensor=torch.tensor(count), avg_num_tokens=expected
        ):
            output = experts(x, count)
        return self.module.paged_stash_group_commit(output, name="experts")

    def check(self) -> None:
        assert not self.module.check_paged_stash_overflow(), "upstream's buffers overflowed"


def take_pages(
    src: Tensor, data: Tensor, host: Tensor, count: Tensor, free: Tensor, *others: Any, **sizes: int
) -> None:
    """Upstream's kernel that stores, by torch."""
    _, head, tail, capacity, record, overflow, _, _, new_head = others
    page_size, width, tokens, first = sizes["PAGE_SIZE"], sizes["HIDDEN_SIZE"], int(count), int(head[0])
    need = -(-tokens // page_size)
    new_head.copy_(head)
    if overflow or int(tail[0]) - first < need:
        overflow.fill_(1)
        return
    record[:need] = free[(first + torch.arange(need)) % capacity[0]]
    data[rows_of(record, tokens, page_size)] = src.view(-1, width)[:tokens]
    new_head[0] += need


def return_pages(
    data: Tensor, host: Tensor, dst: Tensor, count: Tensor, record: Tensor, *others: Any, **sizes: int
) -> None:
    """Upstream's kernel that loads, by torch."""
    _, overflow, free, _, tail, capacity, new_tail = others
    page_size, width, tokens, last = sizes["PAGE_SIZE"], sizes["HIDDEN_SIZE"], int(count), int(tail[0])
    new_tail.copy_(tail)
    if overflow:
        return
    need = -(-tokens // page_size)
    dst.view(-1, width)[:tokens] = data[rows_of(record, tokens, page_size)]
    free[(last + torch.arange(need)) % capacity[0]] = record[:need]
    new_tail[0] += need


def rows_of(record: Tensor, tokens: int, page_size: int) -> Tensor:
    token = torch.arange(tokens)
    return record[token // page_size] * page_size + token % page_size


@contextlib.contextmanager
def kernels_on_cpu(watching: Watching) -> Iterator[None]:
    """Kernels are interpreted, upstream's done by the functions above, all counted and not looked into."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return
    by_torch = {"paged_stash_copy_kernel": take_pages, "paged_stash_pop_kernel": return_pages}
    run = InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        stand_in = by_torch.get(self.fn.__name__.lstrip("_"))
        if stand_in is return_pages:
            watching.note_restored(args[2])
        with watching.kernel(), torch.no_grad():
            if stand_in is None:
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            return stand_in(*args, **kwargs)

    InterpretedFunction.run = launch
    try:
        with megatron_on_cpu() if missing_upstream() is None else contextlib.nullcontext():
            yield
    finally:
        InterpretedFunction.run = run


def missing_upstream() -> str | None:
    try:
        import_module(UPSTREAM)
    except ImportError as error:
        return str(error)
    return None
