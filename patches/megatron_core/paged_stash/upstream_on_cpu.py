"""Toy experts that use upstream's stash as TEGroupedMLP does, upstream's fused experts, and its runner, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shim._torch_names import required

__all__ = [
    "CAPACITY_FACTOR",
    "Chunk",
    "Experts",
    "GroupedMLP",
    "HIDDEN",
    "OverBudgetOnce",
    "Part",
    "ROWS",
    "SETTINGS",
    "STASH",
    "STEP",
    "build",
    "equal_bits",
    "evaluate",
    "forward",
    "fused_experts",
    "fused_gradients",
    "interpreted_kernels",
    "run_twice",
    "settings",
    "train",
    "upstream",
]

STASH = "megatron.core.transformer.moe.paged_stash"
ROWS, HIDDEN = 8, 4
CAPACITY_FACTOR = 2


def settings(factor: float = 2.0) -> SimpleNamespace:
    """What paged_stash_reset reads; buffers are for so many times the average, or if negative, what there was."""
    return SimpleNamespace(
        moe_paged_stash=True,
        moe_paged_stash_page_size=4,
        moe_paged_stash_buffer_size_factor_cuda=factor,
        moe_paged_stash_buffer_size_factor_cpu=0.0,
    )


SETTINGS = settings()


def upstream() -> Any:
    return import_module(STASH)


class GroupedMLP(torch.autograd.Function):
    """relu(x @ w1) @ w2 of the first `count` rows: like a grouped GEMM, it reads no other row."""

    @staticmethod
    def forward(ctx: Any, x: Any, count: int, w1: Tensor, w2: Tensor, marked: bool) -> Tensor:
        hidden: Any = x.new_full((len(x), w1.size(1)), torch.nan)
        hidden[:count] = (x[:count] @ w1).relu()
        if marked:  # as Transformer Engine marks what is to be stashed
            x.grouped_tensor_scale_inv = hidden.grouped_tensor_scale_inv = False
        ctx.save_for_backward(x, hidden, w1, w2)
        ctx.count = count
        output = torch.full_like(x, torch.nan)
        output[:count] = hidden[:count] @ w2
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, hidden, w1, w2 = ctx.saved_tensors
        x, hidden, grad = x[: ctx.count], hidden[: ctx.count], grad[: ctx.count]
        grad_hidden = (grad @ w2.t()) * (hidden > 0)
        grad_x = x.new_zeros(ROWS, HIDDEN)
        grad_x[: ctx.count] = grad_hidden @ w1.t()
        return grad_x, None, x.t() @ grad_hidden, hidden.t() @ grad, None


class Experts(nn.Module):
    """The experts of one layer, on a buffer of ROWS tokens of which the first `count` are valid.

    A weight has as many rows as the buffer: a stash must not take it for an activation.
    """

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(HIDDEN, ROWS))
        self.w2 = nn.Parameter(torch.randn(ROWS, HIDDEN))
        self.marked = marked

    def forward(self, x: Tensor, count: int, stash: bool) -> Tensor:
        if not stash:
            return self.run(x, count)
        x = upstream().paged_stash_group_start(x)
        context = upstream().get_paged_stash_context(
            name="experts",
            max_num_tokens=len(x),
            num_tokens_tensor=torch.tensor(count),
            avg_num_tokens=len(x) // CAPACITY_FACTOR,
        )
        with context:
            y = self.run(x, count)
        stashed: Tensor = upstream().paged_stash_group_commit(y, name="experts")
        return stashed

    def run(self, x: Tensor, count: int) -> Tensor:
        return GroupedMLP.apply(x, count, self.w1, self.w2, self.marked)


class Chunk(nn.Module):
    """Layers of one virtual pipeline stage; its output is a loss, so that chunks need nothing from one another."""

    def __init__(self, layers: int, marked: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(marked) for _ in range(layers))

    def forward(self, microbatch: int, count: int, stash: bool) -> Tensor:
        x = torch.full((ROWS, HIDDEN), torch.nan)
        x[:count] = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(microbatch))
        x.requires_grad_()
        for layer in self.layers:
            x = layer(x, count, stash)
        return x[:count].square().sum()


def build(chunks: int = 1, layers: int = 2, marked: bool = True) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Chunk(layers, marked) for _ in range(chunks))


def train(
    model: nn.ModuleList, counts: Sequence[int], in_flight: int = 2, stash: bool = True, config: Any = SETTINGS
) -> dict[str, Tensor]:
    """The gradients of one iteration over microbatches of `counts` tokens.

    in_flight: microbatches of the last chunk that are forwarded before the first backward; all of them, or as in
    1F1B fewer.
    """
    model.zero_grad()
    if stash:
        upstream().paged_stash_reset(enabled=True, config=config)
    losses = {}
    for step, microbatch, chunk in _schedule(len(counts), len(model), in_flight):
        if step == "forward":
            losses[microbatch, chunk] = forward(model, chunk, microbatch, counts[microbatch], stash)
        else:
            losses.pop((microbatch, chunk)).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def forward(model: nn.ModuleList, chunk: int, microbatch: int, count: int, stash: bool = True) -> Tensor:
    """The loss of one microbatch, after what GPTModel.forward does first."""
    if stash:
        upstream().paged_stash_init_chunk_handler(len(model) if len(model) > 1 else None, chunk)
    loss: Tensor = model[chunk](microbatch, count, stash)
    return loss


def evaluate(model: nn.ModuleList, counts: Sequence[int]) -> None:
    """Forward passes, as a schedule with forward_only runs them."""
    upstream().paged_stash_reset(enabled=False, config=SETTINGS)
    for microbatch, count in enumerate(counts):
        for chunk in range(len(model)):
            forward(model, chunk, microbatch, count)


def _schedule(microbatches: int, chunks: int, in_flight: int) -> Iterator[tuple[str, int, int]]:
    forwards = [("forward", m, c) for c in range(chunks) for m in range(microbatches)]
    backwards = [("backward", m, c) for c in reversed(range(chunks)) for m in range(microbatches)]
    ahead = min((chunks - 1) * microbatches + in_flight, len(forwards))
    yield from forwards[:ahead]
    for place, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + place : ahead + place + 1]


def equal_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Upstream's kernels in Triton's interpreter, here only: TRITON_INTERPRET=1 would be for the whole process."""
    triton: Any = import_module("triton")
    interpreted = required("triton.runtime.interpreter:InterpretedFunction")
    compiled = required("triton.runtime.jit:JITFunction")
    with contextlib.ExitStack() as undo:
        for module, names in (upstream(), list(vars(upstream()))), (triton.language, ["cdiv"]):
            for name in names:
                kernel = getattr(module, name)
                if isinstance(kernel, compiled):
                    undo.callback(setattr, module, name, kernel)
                    setattr(module, name, interpreted(kernel.fn))
        yield


class Part(nn.Module):
    """A module that has nothing but the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def fused_experts() -> Any:
    """Upstream's TEGroupedMLP with stand-ins for two attributes that need a GPU: fused operations, linear layers."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    class Fused(TEGroupedMLP):  # type: ignore[misc]
        def __init__(self, config: Any = SETTINGS, **more: Any) -> None:
            nn.Module.__init__(self)
            torch.manual_seed(0)
            shapes = {"first": (HIDDEN, ROWS), "second": (ROWS, HIDDEN)}
            self.weights = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
            self.config = SimpleNamespace(
                **{**vars(config), **more},
                moe_router_padding_for_quantization=True,
                moe_expert_rank_capacity_factor=CAPACITY_FACTOR,
                delay_offload_until_cuda_graph=False,
            )
            self._fused_ops, self._with_fused_impl, self._use_grouped_tensor = (self.operations,), True, True
            self.linear_fc2 = Part(use_bias=False)

        def operations(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor, *others: Any) -> Any:
            weights = self.weights.values()
            return GroupedMLP.apply(x, int(tokens_per_expert.sum()), *weights, True)

    return Fused


def fused_gradients(experts: Any, counts: Sequence[int], stash: bool) -> dict[str, Tensor]:
    """Of one step over microbatches of `counts` tokens, all forward before all backward."""
    experts.config.moe_paged_stash = stash
    if stash:
        upstream().paged_stash_reset(enabled=True, config=experts.config)
    experts.zero_grad()
    losses = []
    for number, count in enumerate(counts):
        if stash:
            upstream().paged_stash_init_chunk_handler(None, 0)
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(number)).requires_grad_()
        # Into a separate memory, as dispatchers hand it over.
        output, _ = experts(x * 1, torch.tensor([count - 1, 1]), torch.ones(ROWS))
        losses.append(output[:count].square().sum())
    for loss in losses:
        loss.backward()
    return {name: weight.grad.clone() for name, weight in experts.named_parameters() if weight.grad is not None}


class OverBudgetOnce:
    """A token dispatcher that dropped tokens: PagedStashRunner runs the iteration again, and then it did not."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(moe_expert_rank_capacity_factor=CAPACITY_FACTOR)
        self._comm_manager = SimpleNamespace(moe_expert_rank_capacity_factor=CAPACITY_FACTOR)
        self.over_budget = torch.ones(1, dtype=torch.bool)

    def check_over_budget(self) -> Tensor:
        return self.over_budget

    def reset_over_budget(self) -> None:
        self.over_budget.zero_()

    # From 0.20. HybridEP reports no capacity, and has no state to set up anew.

    def check_required_capacity(self) -> None:
        return None

    def invalidate_ep_bootstrap(self) -> None: ...


STEP: dict[str, Any] = {"num_microbatches": 1, "seq_length": ROWS, "forward_only": False}


def run_twice(step: Callable[[], Any], config: Any, layer_config: Any) -> list[Any]:
    """PagedStashRunner around `step` and a chunk with one MoE layer, which makes it run again; what `step` returned."""
    mlp = Part(config=layer_config, experts=Part(config=layer_config), token_dispatcher=OverBudgetOnce())
    decoder = Part(layers=nn.ModuleList([Part(mlp=mlp)]))
    chunk = Part(decoder=decoder, config=config, mtp_process=False, zero_grad_buffer=lambda: None)
    tries: list[Any] = []
    runner = upstream().PagedStashRunner(config, False, [chunk], None, lambda **_: tries.append(step()))
    runner(model=[chunk], data_iterator=iter([None]), **STEP)
    return tries
