"""recompute-helper-build: a stale lock and a missing compiler end in a copy with a warning; all else is upstream's."""

import logging
import os
import time

import pytest
import torch
from megatron.core.tensor_parallel import random

import shim
from shim import testing
from shim._torch_names import find
from shim.patches.megatron_core import recompute_helper_build
from shim.patches.megatron_core.recompute_helper_build import SETTLED, is_stale
from shim.testing import Layout

CELLS = {"0.17.0": "all"}

ID = "recompute-helper-build"
pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch, tmp_path):
    """A process that has compiled nothing, and a directory of extensions that is empty."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        monkeypatch.setattr(random, "_share_storage_ext", None)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        yield


@pytest.fixture
def lock(tmp_path):
    file = tmp_path / recompute_helper_build.HELPER / "lock"
    file.parent.mkdir()
    file.touch()
    return file


def age(lock, seconds):
    os.utime(lock, (time.time() - seconds,) * 2)


def fails(error):
    def load_inline(**given):
        raise error

    return load_inline


def no_build(**given):
    pytest.fail("nothing is to be compiled")


def refill():
    """Whether an output that was freed has its values again."""
    right = torch.randn(5, 3)
    output = right.clone()
    output.untyped_storage().resize_(0)
    random._get_share_storage()(output, right)
    return torch.equal(output, right)


def applied():
    return shim.patched(only=[ID], require=[ID])


waits_for_a_file = pytest.mark.skipif(
    find("torch.utils.cpp_extension:FileBaton") is None, reason="the lock of this torch is one of the system"
)


@waits_for_a_file
def test_a_stale_lock_is_named_at_once_and_outputs_are_copied(lock, monkeypatch, caplog):
    monkeypatch.setattr(random, "load_inline", no_build)
    age(lock, 2 * SETTLED)
    started = time.monotonic()
    with applied():
        assert refill() and refill()
    assert time.monotonic() - started < SETTLED
    said = [record.message for record in caplog.records if ID in record.message]
    assert len(said) == 1 and str(lock) in said[0] and "remove this file" in said[0]


def test_the_file_of_a_lock_of_the_system_says_nothing(lock, monkeypatch, caplog):
    """From torch 2.14 on it stays in the directory for ever."""
    monkeypatch.delattr("torch.utils.cpp_extension.FileBaton", raising=False)
    built = []

    def load_inline(**given):
        built.append(given["name"])
        return type("Extension", (), {"share_storage": staticmethod(recompute_helper_build.copy_storage)})

    monkeypatch.setattr(random, "load_inline", load_inline)
    started = time.monotonic()
    with applied():
        assert refill()
    assert time.monotonic() - started < SETTLED and built and "waiting" not in caplog.text


ERRORS = [RuntimeError("Error building extension 'x'\nlong"), FileNotFoundError("c++"), ImportError("no ninja")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_without_a_compiler_outputs_are_copied(error, monkeypatch, caplog):
    monkeypatch.setattr(random, "load_inline", fails(error))
    with applied():
        assert refill() and refill()
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING and ID in record.message]
    assert len(said) == 1 and str(error).partition("\n")[0] in said[0] and "long" not in said[0]


def test_other_errors_are_not_taken_for_a_missing_compiler(monkeypatch):
    monkeypatch.setattr(random, "load_inline", fails(KeyboardInterrupt()))
    with applied(), pytest.raises(KeyboardInterrupt):
        refill()


def test_the_helper_is_compiled_as_on_stock(monkeypatch, caplog):
    """Once, by upstream's function, and with a word before it."""
    built, helper = [], lambda output, recomputed: recompute_helper_build.copy_storage(output, recomputed)

    def load_inline(**given):
        assert "compiling" in caplog.text
        built.append(given["name"])
        return type("Extension", (), {"share_storage": staticmethod(helper)})

    monkeypatch.setattr(random, "load_inline", load_inline)
    with caplog.at_level(logging.INFO, "shim"), applied():
        assert refill() and refill()
        assert random._get_share_storage() is helper
    assert built == [recompute_helper_build.HELPER]


class Clock:
    """A clock that its own sleep moves on. at: what happens when."""

    def __init__(self, at=()):
        self.time, self.at = time.time(), dict(at)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds
        for when in [when for when in self.at if when <= self.time]:
            self.at.pop(when)()


def test_a_lock_that_somebody_holds_is_waited_for(lock, caplog):
    clock = Clock()
    clock.at = {clock.time + 40: lock.unlink}
    assert not is_stale(lock, clock.now, clock.sleep)
    assert clock.time - time.time() < 60 and caplog.text.count("waiting for another process") == 1


def test_a_compiler_that_writes_is_waited_for(lock):
    clock = Clock()
    source = lock.parent / "main.o"
    end = clock.time + 2.5 * SETTLED
    writes = [clock.time + step for step in range(60, int(2.5 * SETTLED), 60)]
    clock.at = {when: (lambda when=when: (source.touch(), os.utime(source, (when, when)))) for when in writes}
    clock.at[end] = lock.unlink
    assert not is_stale(lock, clock.now, clock.sleep) and clock.time >= end


@pytest.mark.parametrize("ahead", [0, 3600], ids=["same clock", "clock ahead"])
def test_a_lock_beside_which_nothing_changes_is_stale(lock, ahead):
    """Also if the machine that has made it has another clock."""
    age(lock, -ahead)
    clock = Clock()
    started = clock.time
    assert is_stale(lock, clock.now, clock.sleep) and clock.time - started <= SETTLED + 2


def gradients(recompute):
    """Of the weights around an activation, whose output is discarded and recomputed, or not."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    hidden = first(torch.randn(4, 8))
    if recompute:
        checkpoint = random.CheckpointWithoutOutput(fp8=None)
        middle = checkpoint.checkpoint(torch.nn.functional.gelu, hidden)
        out = second(middle)
        checkpoint.discard_output_and_register_recompute(out)
        assert middle.untyped_storage().size() == 0
    else:
        out = second(torch.nn.functional.gelu(hidden))
    out.square().sum().backward()
    return [weight.grad for weight in (*first.parameters(), *second.parameters())]


@waits_for_a_file
def test_recompute_behind_a_stale_lock_gives_the_bits_of_none(lock, monkeypatch):
    monkeypatch.setattr(random, "load_inline", no_build)
    age(lock, 2 * SETTLED)
    with applied():
        assert all(map(torch.equal, gradients(True), gradients(False)))


def test_reverted_is_never_applied(monkeypatch):
    monkeypatch.setattr(random, "load_inline", fails(RuntimeError("no compiler")))
    with applied():
        assert refill()
    with pytest.raises(RuntimeError, match="no compiler"):
        refill()
