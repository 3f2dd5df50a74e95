"""Ranks: results by rank, and errors that say which rank did what."""

import gc
import multiprocessing.util
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from shim.testing import RankError, Ranks, forks  # noqa: E402
from shim.testing.patience import patience  # noqa: E402


@pytest.fixture
def ranks():
    with Ranks(2) as pool:
        yield pool


def who():
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def total(value):
    tensor = torch.full((3,), float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("a key that is not there")
    dist.barrier()  # never answered


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


def pid():
    return os.getpid()


def backward():
    weight = torch.ones(2, requires_grad=True)
    weight.square().sum().backward()
    return weight.grad


def not_picklable():
    return lambda: None


def test_results_come_by_rank(ranks):
    assert ranks.run(who) == [(0, 2, "0", "2"), (1, 2, "1", "2")]


def test_ranks_share_one_group_and_tensors_come_back(ranks):
    for result in ranks.run(total, 4):
        assert result.tolist() == [9.0] * 3


def test_ranks_persist_between_runs(ranks):
    assert ranks.run(pid) == ranks.run(pid)
    assert os.getpid() not in ranks.run(pid)


def test_an_exception_names_rank_and_line_and_the_pool_recovers(ranks):
    before = ranks.run(pid)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised KeyError") as caught:
        ranks.run(fail_on, 1)
    assert time.monotonic() - started < patience()
    assert caught.value.rank == 1 and caught.value.exception_type == "KeyError"
    assert "in fail_on" in caught.value.remote_traceback
    assert not set(before) & set(ranks.run(pid))
    assert [result.tolist() for result in ranks.run(total, 0)] == [[1.0] * 3] * 2


def both_fail(slow, seconds, others):
    if dist.get_rank() == slow:
        time.sleep(seconds)
        raise ValueError("the cause")
    raise RuntimeError(others)


def test_an_error_has_those_of_the_other_ranks_too(ranks):
    with pytest.raises(RankError, match="rank 0 raised RuntimeError") as caught:
        ranks.run(both_fail, 1, 0.1, "a second symptom")
    (other,) = caught.value.others
    assert (other.rank, other.exception_type) == (1, "ValueError") and "the cause" in other.remote_traceback


@pytest.mark.parametrize("symptom", ["Connection closed by peer [127.0.0.1]:4515", "Connection reset by peer"])
def test_a_rank_that_has_lost_its_peer_waits_for_the_peer_to_say_why(ranks, symptom):
    """A peer whose own error is slower than the loss of its connection is the cause, and not what is told of it."""
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError") as caught:
        ranks.run(both_fail, 1, 1.5, symptom)
    assert [other.rank for other in caught.value.others] == [0]
    assert time.monotonic() - started < patience()


def test_a_hang_ends_with_the_rank_and_where_it_was(ranks):
    with pytest.raises(RankError, match=r"rank 1 did not answer within 5 s.*\[1\] of 2") as caught:
        ranks.run(sleep_on, 1, timeout=5)
    assert "in sleep_on" in caught.value.remote_traceback


def test_a_dead_rank_is_noticed_at_once(ranks):
    with pytest.raises(RankError, match="rank 0 died with exit code 7"):
        ranks.run(die_on, 0)


def test_a_result_that_cannot_be_pickled_is_an_error_not_a_hang(ranks):
    with pytest.raises(RankError, match="Can't pickle"):
        ranks.run(not_picklable)


def test_fork_after_a_backward_and_a_world_of_one():
    backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    with Ranks(2) as pool:
        assert [grad.tolist() for grad in pool.run(backward)] == [[2.0, 2.0]] * 2
    assert not dist.is_initialized()


def _compile_in_a_thread():
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.pool().submit(int, "7").result(timeout=patience())


def test_ranks_compile_after_a_process_that_has_compiled(monkeypatch):
    """torch's pool of threads, which hands its work to the compiler, has no threads after a fork."""
    import torch._inductor.config as config

    monkeypatch.setattr(config, "compile_threads", 2)
    assert _compile_in_a_thread() == 7
    with Ranks(2) as ranks:
        assert ranks.run(_compile_in_a_thread) == [7, 7]


class GarbageOfThisProcess:
    """As a process group of gloo, which nothing but the process that made it may destroy."""

    def __init__(self):
        self.itself, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            os._exit(1)


def _collects():
    garbage = GarbageOfThisProcess()
    garbage.owner = None  # so this rank ends where it is collected
    del garbage
    gc.collect()


def test_ranks_leave_the_garbage_of_their_parent_alone():
    """A rank's collector may run as soon as the rank is there. Here it does: it has a threshold of one object."""

    class ThisTest:
        """Forks are told while it lives."""

    this_test = ThisTest()
    multiprocessing.util.register_after_fork(this_test, lambda _: gc.set_threshold(1))
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    try:
        GarbageOfThisProcess()
        with Ranks(2) as ranks:
            assert len(set(ranks.run(pid))) == 2
            assert gc.isenabled()
            with pytest.raises(RankError, match="died"):
                ranks.run(_collects)  # what comes later is collected
    finally:
        gc.set_threshold(*before)


def test_two_pools_at_once(ranks):
    with Ranks(2) as other:
        assert ranks.run(who) == other.run(who)


def test_a_closed_pool_says_so(ranks):
    ranks.run(pid)
    ranks.close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run(pid)


def test_ranks_end_when_their_parent_is_killed():
    code = (
        "import os, signal; from shim.testing import Ranks; import tests.testing.test_ranks as t\n"
        "pool = Ranks(2); print(*pool.run(t.pid), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True)
    pids = [int(text) for text in parent.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + patience()
    while any(is_running(rank) for rank in pids):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_groups_end_later_where_their_end_may_hang(monkeypatch):
    """A destructor of gloo's that waits for a thread, which waits for Python, is torch's up to 2.7."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for later in (False, True):
        monkeypatch.setattr(forks, "_MAY_HANG", later)
        group = dist.new_group([0])
        seen = weakref.ref(group)
        forks.free_groups([group])
        del group
        gc.collect()
        assert (seen() is not None) == later
    forks.free_groups([])
    gc.collect()
    assert seen() is None


MANY_GROUPS = """
import torch, torch.distributed as dist
from shim.testing.forks import free_groups
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(300):
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1000), group=group)  # the thread of the group has the last reference
    free_groups([group])
    del group
"""


@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) >= (2, 8), reason="this torch does not hang")
def test_three_hundred_groups_end():
    subprocess.run([sys.executable, "-c", MANY_GROUPS], check=True, timeout=patience())
