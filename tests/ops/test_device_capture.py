"""The algorithms while a CUDA graph is captured, on a pretended device: replays compute, and the host is not asked."""

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from shim.ops import PagedStash, _stash_pool, _stashed_tensor, token_logprobs  # noqa: E402
from shim.ops.rope import thd_freqs  # noqa: E402
from shim.testing import pretend_cuda  # noqa: E402
from shim.testing.pretend_cuda import values_of  # noqa: E402

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: kernels are captured too")
ROWS, WIDTH = 8, 4


@pytest.fixture(autouse=True)
def device():
    with pretend_cuda.cuda_pretended():
        yield torch.device("cuda")


def captured(function):
    """(its results, the graph that computes them)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph


def test_log_probabilities_follow_the_logits(device):
    logits = torch.randn(4, 16, device=device, requires_grad=True)
    target = torch.tensor([1, 2, -100, 3]).cuda()

    def step():
        result = token_logprobs(logits, target, entropy=True)
        return (result.logprob, result.entropy, *torch.autograd.grad(result.logprob.sum(), logits))

    results, graph = captured(step)
    with torch.no_grad():
        logits.copy_(torch.randn(4, 16))
    graph.replay()
    assert all(torch.equal(values_of(one), values_of(other)) for one, other in zip(results, step()))


def test_rows_of_a_table_follow_the_lengths(device):
    table, cu = torch.arange(10.0, device=device), torch.tensor([0, 3, 8]).cuda()
    rows, graph = captured(lambda: thd_freqs(table, cu, 8))
    cu.copy_(torch.tensor([0, 6, 8]))
    graph.replay()
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def expert(x):
    return torch.nn.functional.silu(x).square()


class Stashed:
    """One pass of a stashed expert over buffers whose first rows have tokens."""

    def __init__(self, stash):
        self.stash = stash
        self.x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        self.valid = torch.tensor([5]).cuda()

    def forward(self):
        return self.stash.run(expert, self.x, rows=ROWS, valid=self.valid)

    def right(self):
        """The gradient of the rows with tokens, without a stash."""
        x, valid = values_of(self.x.detach()).clone().requires_grad_(), int(values_of(self.valid))
        return torch.autograd.grad(expert(x)[:valid].sum(), x)[0][:valid]

    def backward(self, output):
        (gradient,) = torch.autograd.grad(output[:5].sum(), self.x)
        return gradient


def free_pages(stash):
    (pool,) = stash.pools.values()
    state = values_of(pool.current_state())
    return int(state[_stash_pool.TAIL] - state[_stash_pool.HEAD])


def drop_an_eager_forward_while_capturing():
    """A graph of a stashed pass; what an eager pass has stashed goes while it is captured."""
    stash = PagedStash(pages=32, page_size=1, overflow="raise")
    first, second = Stashed(stash), Stashed(stash)
    first.backward(first.forward())  # the pool is there
    everything = free_pages(stash)
    left = [first.forward()]
    assert free_pages(stash) < everything

    def step():
        left.clear()
        return second.backward(second.forward())

    gradient, graph = captured(step)
    for _ in range(3):
        graph.replay()
    assert torch.equal(values_of(gradient)[:5], second.right())
    with torch.no_grad():
        second.x.copy_(torch.randn(ROWS, WIDTH))
    graph.replay()
    assert torch.equal(values_of(gradient)[:5], second.right())
    assert free_pages(stash) == everything


def test_what_an_eager_forward_left_behind_is_not_captured():
    """Each replay would give its pages back, by lists of pages that are gone."""
    drop_an_eager_forward_while_capturing()


def test_a_stash_that_does_not_ask_for_a_capture_is_found(monkeypatch):
    for module in (_stash_pool, _stashed_tensor):
        if hasattr(module, "capturing"):
            monkeypatch.setattr(module, "capturing", lambda: False)
    with pytest.raises(pretend_cuda.DeviceFaultError, match="freed since"):
        drop_an_eager_forward_while_capturing()
