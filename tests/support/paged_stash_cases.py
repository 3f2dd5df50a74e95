"""What the tests of the paged stash share: toy experts that use it as TEGroupedMLP does, and loops that train them."""

import contextlib
from types import SimpleNamespace

import megatron.core.transformer.moe.paged_stash as paged_stash
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

ROWS, HIDDEN = 8, 4
# A weight has as many rows as the buffer of tokens: a stash must not take it for an activation.
WIDE = ROWS
CAPACITY_FACTOR = 2


def settings(factor=2.0, page_size=4):
    """What paged_stash_reset reads; buffers are for so many times the average, or if negative, what there was."""
    return SimpleNamespace(
        moe_paged_stash=True,
        moe_paged_stash_page_size=page_size,
        moe_paged_stash_buffer_size_factor_cuda=factor,
        moe_paged_stash_buffer_size_factor_cpu=0.0,
    )


class _GroupedMLP(torch.autograd.Function):
    """relu(x @ w1) @ w2 of the first `count` rows: like a grouped GEMM, it reads no other row."""

    @staticmethod
    def forward(ctx, x, count, w1, w2, marked):
        hidden = x.new_full((len(x), w1.size(1)), torch.nan)
        hidden[:count] = (x[:count] @ w1).relu()
        if marked:  # as Transformer Engine marks what is to be stashed
            x.grouped_tensor_scale_inv = hidden.grouped_tensor_scale_inv = False
        ctx.save_for_backward(x, hidden, w1, w2)
        ctx.count = count
        output = torch.full_like(x, torch.nan)
        output[:count] = hidden[:count] @ w2
        return output

    @staticmethod
    def backward(ctx, grad):
        x, hidden, w1, w2 = ctx.saved_tensors
        x, hidden, grad = x[: ctx.count], hidden[: ctx.count], grad[: ctx.count]
        grad_hidden = (grad @ w2.t()) * (hidden > 0)
        grad_x = x.new_zeros(ROWS, HIDDEN)
        grad_x[: ctx.count] = grad_hidden @ w1.t()
        return grad_x, None, x.t() @ grad_hidden, hidden.t() @ grad, None


class Experts(torch.nn.Module):
    """The experts of one layer, on a buffer of ROWS tokens of which the first `count` are valid."""

    def __init__(self, marked):
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.randn(HIDDEN, WIDE))
        self.w2 = torch.nn.Parameter(torch.randn(WIDE, HIDDEN))
        self.marked = marked

    def forward(self, x, count, stash):
        if not stash:
            return self.run(x, count)
        x = paged_stash.paged_stash_group_start(x)
        context = paged_stash.get_paged_stash_context(
            name="experts",
            max_num_tokens=len(x),
            num_tokens_tensor=torch.tensor(count),
            avg_num_tokens=len(x) // CAPACITY_FACTOR,
        )
        with context:
            y = self.run(x, count)
        return paged_stash.paged_stash_group_commit(y, name="experts")

    def run(self, x, count):
        return _GroupedMLP.apply(x, count, self.w1, self.w2, self.marked)


class Chunk(torch.nn.Module):
    """Layers of one virtual pipeline stage; its output is a loss, so that chunks need nothing from one another."""

    def __init__(self, layers, marked):
        super().__init__()
        self.layers = torch.nn.ModuleList(Experts(marked) for _ in range(layers))

    def forward(self, microbatch, count, stash):
        x = torch.full((ROWS, HIDDEN), torch.nan)
        x[:count] = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(microbatch))
        x.requires_grad_()
        for layer in self.layers:
            x = layer(x, count, stash)
        return x[:count].square().sum()


def build(chunks=1, layers=2, marked=True):
    torch.manual_seed(0)
    return torch.nn.ModuleList(Chunk(layers, marked) for _ in range(chunks))


def train(model, counts, in_flight=2, stash=True, config=settings()):
    """The gradients of one iteration over microbatches of `counts` tokens.

    in_flight: microbatches of the last chunk that are forwarded before the first backward; all of them, or as in
    1F1B fewer.
    """
    model.zero_grad()
    if stash:
        paged_stash.paged_stash_reset(enabled=True, config=config)
    losses = {}
    for step, microbatch, chunk in _schedule(len(counts), len(model), in_flight):
        if step == "forward":
            losses[microbatch, chunk] = forward(model, chunk, microbatch, counts[microbatch], stash)
        else:
            losses.pop((microbatch, chunk)).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def forward(model, chunk, microbatch, count, stash=True):
    """The loss of one microbatch, after what GPTModel.forward does first."""
    if stash:
        paged_stash.paged_stash_init_chunk_handler(len(model) if len(model) > 1 else None, chunk)
    return model[chunk](microbatch, count, stash)


def evaluate(model, counts, config=settings()):
    """Forward passes, as a schedule with forward_only runs them."""
    paged_stash.paged_stash_reset(enabled=False, config=config)
    for microbatch, count in enumerate(counts):
        for chunk in range(len(model)):
            forward(model, chunk, microbatch, count)


def _schedule(microbatches, chunks, in_flight):
    forwards = [("forward", m, c) for c in range(chunks) for m in range(microbatches)]
    backwards = [("backward", m, c) for c in reversed(range(chunks)) for m in range(microbatches)]
    ahead = min((chunks - 1) * microbatches + in_flight, len(forwards))
    yield from forwards[:ahead]
    for place, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + place : ahead + place + 1]


def equal_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def interpreted_kernels():
    """Upstream's kernels in Triton's interpreter, here only: TRITON_INTERPRET=1 would be for the whole process."""
    with contextlib.ExitStack() as undo:
        for module, names in (paged_stash, list(vars(paged_stash))), (triton.language, ["cdiv"]):
            for name in names:
                kernel = getattr(module, name)
                if isinstance(kernel, JITFunction):
                    undo.callback(setattr, module, name, kernel)
                    setattr(module, name, InterpretedFunction(kernel.fn))
        yield


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """Else torch.empty may return memory that still holds what should have been restored to it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Part(torch.nn.Module):
    """A module that has nothing but the given attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class OverBudgetOnce:
    """A token dispatcher that dropped tokens: PagedStashRunner runs the iteration again, and then it did not."""

    def __init__(self):
        self.config = SimpleNamespace(moe_expert_rank_capacity_factor=CAPACITY_FACTOR)
        self._comm_manager = SimpleNamespace(moe_expert_rank_capacity_factor=CAPACITY_FACTOR)
        self.over_budget = torch.ones(1, dtype=torch.bool)

    def check_over_budget(self):
        return self.over_budget

    def reset_over_budget(self):
        self.over_budget.zero_()

    # From 0.20. HybridEP reports no capacity, and has no state to set up anew.

    def check_required_capacity(self):
        return None

    def invalidate_ep_bootstrap(self): ...


def run_twice(step, config, layer_config):
    """PagedStashRunner around `step` and a chunk with one MoE layer, which makes it run again; what `step` returned."""
    mlp = Part(config=layer_config, experts=Part(config=layer_config), token_dispatcher=OverBudgetOnce())
    decoder = Part(layers=torch.nn.ModuleList([Part(mlp=mlp)]))
    chunk = Part(decoder=decoder, config=config, mtp_process=False, zero_grad_buffer=lambda: None)
    tries = []
    runner = paged_stash.PagedStashRunner(config, False, [chunk], None, lambda **_: tries.append(step()))
    runner(model=[chunk], data_iterator=iter([None]), num_microbatches=1, seq_length=ROWS, forward_only=False)
    return tries
