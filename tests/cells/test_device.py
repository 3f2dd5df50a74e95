"""Training steps on a pretended CUDA: the patches add no fault, no host read, no blocking copy, no launch and no byte."""

import contextlib

import chosen
import device_steps
import pytest
import torch
from device_steps import STEPS

import shim
from shim import testing
from shim.testing.cells import EVERYDAY
from shim.testing.pretend_cuda import Counts

RELEASE = testing.release()
VERSION = tuple(int(part) for part in RELEASE.split(".")[:2])
IDS = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
NEVER_MORE = ("faults", "host_reads", "blocking_copies", "launches", "bytes_moved")


@pytest.fixture(autouse=True)
def on_cpu():
    """In the place of the fixture that turns CUDA into the CPU."""


@pytest.fixture(scope="module")
def ranks():
    """Pools by the number of ranks."""
    with testing.Ranks(1) as one, testing.Ranks(2) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def runs(ranks):
    """What has run: (step, patches) -> its Run on the first rank."""
    found = {}

    def run(name, ids=()):
        key = name, tuple(ids)
        if key not in found:
            function, given = (device_steps.patched_counted, [list(ids)]) if ids else (device_steps.run_counted, [])
            found[key] = ranks[STEPS[name].layout.world].run(function, name, *given)[0]
        return found[key]

    return run


def amiss(stock, patched, allowed=()):
    """What is worse with patches than on stock, in words; "" if nothing is."""
    if patched.error:
        return "" if stock.error else patched.error
    mine = patched.counts
    told = [f"refused by NCCL:\n{mine.told('refused_by_nccl')}"] if of_shim(mine, "refused_by_nccl") else []
    if stock.error:  # nothing to compare with, so nothing of this is due to shim
        for name in ("faults", "host_reads", "blocking_copies"):
            told += [f"{name} of shim:\n{mine.told(name)}"] if of_shim(mine, name) else []
        return "\n".join(told)
    more = mine.beyond(stock.counts)
    for name in NEVER_MORE:
        if name in more and name not in allowed:
            told.append(f"{more[name]} {name} more than stock's {stock.counts.totals()[name]}:")
            told.append(mine.told(name, stock.counts))
    return "\n".join(told)


def of_shim(counts, name):
    return any(event.place.startswith("shim/") for event in getattr(counts, name))


@pytest.mark.parametrize("name", STEPS)
def test_all_patches_together(name, runs):
    assert amiss(runs(name), runs(name, IDS)) == ""
