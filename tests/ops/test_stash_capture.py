"""The stash while a CUDA graph is captured, which is pretended: what a capture computes runs at each of its replays."""

import pytest
import torch

from shim.ops import _stash_eager, _stash_pool
from shim.ops._stash_pool import PagePool
from shim.ops._stash_rows import valid_rows
from shim.ops._stashed_tensor import StashedTensor

PAGES = 6


class Capture:
    """Whether a capture is under way, and what was released of a pool in captures and outside."""

    def __init__(self):
        self.on, self.released = False, []


@pytest.fixture
def capture(monkeypatch):
    made, release = Capture(), _stash_eager.release

    def counting(pool, count, pages, where):
        made.released.append("captured" if made.on else "eager")
        release(pool, count, pages, where)

    monkeypatch.setattr(_stash_pool, "capturing", lambda: made.on)
    monkeypatch.setattr(_stash_eager, "release", counting)
    return made


@pytest.fixture
def pool():
    return PagePool(torch.float32, 2, 2, PAGES, 0, torch.device("cpu"), _stash_eager)


def stashed(pool, valid=None):
    tensor = torch.arange(8.0).reshape(4, 2)
    where = torch.zeros(1, dtype=torch.int64)
    return StashedTensor(tensor, valid_rows(4, valid, torch.device("cpu")), pool, where, expected=4, kept=False)


def free(pool):
    state = pool.current_state()
    return int(state[_stash_pool.TAIL] - state[_stash_pool.HEAD])


def test_pages_of_an_eager_forward_wait_for_the_end_of_a_capture(pool, capture):
    """Each replay of the graph would give them back again."""
    eager = stashed(pool)
    capture.on = True
    eager.release()
    inside = stashed(pool)
    inside.release()
    assert capture.released == ["captured"] and pool.live == 1
    capture.on = False
    assert free(pool) == PAGES
    assert capture.released == ["captured", "eager"] and pool.live == 0


def test_the_next_forward_finds_the_pages_of_those_that_waited(pool, capture):
    held = [stashed(pool) for _ in range(PAGES // 2)]
    capture.on = True
    for each in held:
        each.release()
    capture.on = False
    assert torch.equal(stashed(pool).restore(), torch.arange(8.0).reshape(4, 2))  # no page was free before


def test_every_tensor_of_a_stored_one_is_known_to_the_stream(pool, monkeypatch):
    """Of the places of valid rows too, which store and load read on the stream of the pool."""
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(id(tensor)))
    one = stashed(pool, torch.tensor([True, False, True, True]))
    expected = {id(each) for each in (one.rows.count, one.rows.place, one._pages, one.where)}
    pool._stream = object()
    one.release()
    assert set(recorded) == expected
