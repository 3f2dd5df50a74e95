"""What the tests of the paged stash share: experts, batches, and stashes of all kinds."""

import contextlib
import weakref
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import silu  # noqa: E402

from shim.ops._stashed_tensor import StashedTensor  # noqa: E402
from shim.ops.paged_stash import PagedStash  # noqa: E402

ROWS, HIDDEN, INNER = 24, 12, 8
SEES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # older torch unpacks what a checkpoint has


@contextlib.contextmanager
def noted_records():
    """All StashedTensors that are made meanwhile and live."""
    records, init = weakref.WeakSet(), StashedTensor.__init__

    def noting(self, *args, **keywords):
        init(self, *args, **keywords)
        records.add(self)

    with mock.patch.object(StashedTensor, "__init__", noting):
        yield records


def pages_for(rows, page_size):
    return -(-rows // page_size)


def mask_of(rows, valid):
    """The valid rows by the words of the documentation, bool [rows]."""
    row = torch.arange(rows)
    if valid is None:
        return row >= 0
    if isinstance(valid, int) or (valid.numel() == 1 and valid.dtype != torch.bool):
        return row < int(valid)
    if valid.dtype == torch.bool:
        return valid.clone()
    capacity = rows // len(valid)
    return row % capacity < valid[row // capacity]


def assert_nothing_lives(stash):
    assert stash.live == 0
    assert all(use.wanted == 0 for use in stash.statistics().pools)


class Save(torch.autograd.Function):
    """Saves its inputs, the first of them twice; gives out one number."""

    @staticmethod
    def forward(ctx, leaf, *tensors):
        ctx.save_for_backward(*tensors, tensors[0])
        return leaf * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


class Glu(torch.autograd.Function):
    """Gated activation that saves its input and the probabilities, as fused ones do."""

    @staticmethod
    def forward(ctx, x, probs):
        ctx.save_for_backward(x, probs)
        gate, up = x.chunk(2, -1)
        return silu(gate) * up * probs

    @staticmethod
    def backward(ctx, gradient):
        x, probs = ctx.saved_tensors
        with torch.enable_grad():
            x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
            gate, up = x.chunk(2, -1)
            return torch.autograd.grad(silu(gate) * up * probs, (x, probs), gradient)


class Expert(torch.nn.Module):
    def __init__(self, dtype=torch.float32, fused=False, inner=INNER, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(HIDDEN, 2 * inner, dtype=dtype)
        self.down = torch.nn.Linear(inner, HIDDEN, bias=False, dtype=dtype)
        self.fused = fused

    def forward(self, x, probs):
        hidden = self.up(x)
        if self.fused:
            return self.down(Glu.apply(hidden, probs))
        gate, up = hidden.chunk(2, -1)
        return self.down(silu(gate) * up * probs)


class Batch:
    """Inputs of an expert, and the gradient of its output; those of rows that are not valid are zeros."""

    def __init__(self, valid=None, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.valid = valid
        self.mask = mask_of(ROWS, valid)[:, None]
        self.x, self.weight = (torch.randn(ROWS, HIDDEN, generator=generator).to(dtype) for _ in range(2))
        self.probs = torch.rand(ROWS, 1, generator=generator).to(dtype)

    def leaves(self):
        return self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()

    def loss(self, output):
        return torch.where(self.mask, output * self.weight, 0).sum()


def run(stash, function, *args, valid=None):
    return function(*args) if stash is None else stash.run(function, *args, rows=ROWS, valid=valid)


def gradients(stash, expert, batch, call=run):
    leaves = batch.leaves()
    output = call(stash, expert, *leaves, valid=batch.valid)
    return torch.autograd.grad(batch.loss(output), [*leaves, *[p for p in expert.parameters() if p.requires_grad]])


def assert_same(found, expected):
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))


def ample(**options):
    return PagedStash(1000, page_size=4, overflow="raise", **options)


VALID = {
    "all": None,
    "int": 10,
    "none": torch.tensor(0),
    "more than all": torch.tensor([ROWS + 7]),
    "first": torch.tensor([10], dtype=torch.int32),
    "mask": torch.arange(ROWS) % 3 != 1,
    "segments": torch.tensor([3, 0, 9, 6]),
}
STASHES = {
    "ample": ample,
    "keep, too small": lambda: PagedStash(4, page_size=4),
    "keep, empty": lambda: PagedStash(0, page_size=4),
    "keep, with a host pool": lambda: PagedStash(2, page_size=4, host_pages=3),
    "spill": lambda: PagedStash(3, page_size=4, host_pages=1000, overflow="spill"),
    "spill, no pool": lambda: PagedStash(0, page_size=3, host_pages=1000, overflow="spill"),
}
BOTH = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
SOME = pytest.mark.parametrize("valid", [VALID["first"], VALID["mask"]], ids=["first", "mask"])
ANY_STASH = pytest.mark.parametrize("stash", STASHES.values(), ids=STASHES)
