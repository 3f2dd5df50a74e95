"""Training steps on a pretended CUDA: patches add no fault, no host read, no blocking copy, no launch and no byte."""

from typing import NamedTuple

import chosen
import device_steps
import gloo
import pytest
import torch
import torch.distributed as dist
from device_steps import STEPS
from thorough import times

import shim
from shim import testing
from shim.testing.cells import EVERYDAY

CELLS = {"0.18.2": "all"}

RELEASE = testing.release()
IDS = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
NEVER_MORE = ("faults", "host_reads", "blocking_copies", "launches", "bytes_moved")


class Price(NamedTuple):
    """The most by which steps may exceed stock's launches and bytes, and why they do. alone: only under one patch."""

    steps: tuple[str, ...]
    launches: int
    bytes_moved: int
    why: str
    alone: bool = False


PRICES = (
    Price(
        ("packed", "MLA, packed", "mrope, packed"),
        6,
        7_000,
        "rope-thd: from 0.15 on stock takes views of some tables, and reads each sequence's length for that. What it "
        "finds for a row serves all layers: six layers and more take fewer launches than stock",
    ),
    Price(
        ("MTP, packed", "MTP, packed and padded"),
        6,
        0,
        "rope-thd: as above, for the layer of MTP as well; beside the other patches there are fewer in all",
        alone=True,
    ),
    Price(("MTP", "TP 2, SP"), 8, 200, "mtp-packed-sequences: a roll sees from its index which row it is of"),
    Price(
        ("MTP, packed and padded",),
        0,
        4_000,
        "mtp-packed-sequences: masks of padding, a byte for each token, where stock's loop reads slices of the row",
    ),
    Price(("recompute",), 45, 700_000, "mtp-recompute, up to 0.14: stock keeps what the config wants recomputed"),
    Price(("experts, replay",), 40, 10_000, "router-replay: each router looks for experts that are named twice"),
    Price(("experts, stash",), 130, 6_000_000, "paged-stash: it copies rows, which stock keeps with all empty ones"),
    Price(("fused linear",), 80, 400_000, "fused-linear-logprob: logits are made twice, and are few beside the weight"),
    Price(("TP 2, SP",), 55, 8_000, "chunked-logprob: one message instead of three, and more numbers for each token"),
)


def limits(name, alone=False):
    """By how much a step may exceed stock."""
    found = [price for price in PRICES if name in price.steps and (alone or not price.alone)]
    return {what: sum(getattr(price, what) for price in found) for what in ("launches", "bytes_moved")}


@pytest.fixture(autouse=True)
def on_cpu():
    """In the place of the fixture that turns CUDA into the CPU."""


@pytest.fixture(scope="module")
def runs(ranks):
    """Runs a step on the first rank, on stock or under all patches, once each."""
    found = {}

    def run(name, ids=()):
        key = name, bool(ids)
        if key not in found:
            found[key] = ranks[STEPS[name].layout.world].run(device_steps.run_counted, name, list(ids))[0]
        return found[key]

    return run


def amiss(stock, patched, limits):
    """What is worse with patches than on stock, in words; "" if nothing is. limits: what may be more, by how much."""
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
        if more.get(name, 0) > limits.get(name, 0):
            told.append(f"{more[name]} {name} more than stock's {stock.counts.totals()[name]}:")
            told.append(mine.told(name, stock.counts))
    return "\n".join(told)


def of_shim(counts, name):
    return any(event.place.startswith("shim/") for event in getattr(counts, name))


# What a release cannot do, whatever patches it gets: the beginning of its version, and the error.
CANNOT = {"MLA, packed": ("0.12", "RuntimeError: Sizes of tensors must match")}


def cannot(name, error):
    version, known = CANNOT.get(name, ("none", "none"))
    return (
        error.startswith("cannot run: ")
        or gloo.lacks(error)
        or (RELEASE.startswith(version) and error.startswith(known))
    )


@pytest.mark.parametrize("name", STEPS)
def test_all_patches_together(name, runs):
    error = runs(name, IDS).error
    assert not error or cannot(name, error)
    assert amiss(runs(name), runs(name, IDS), limits(name)) == ""


def shown_here(id):
    """Whether this release shows the variant of the patch under `make test`; else every release shows all."""
    return not chosen.ONCE or RELEASE not in EVERYDAY or RELEASE in chosen.cells_showing((id,), EVERYDAY)


# The other steps have the same patches at work, and fewer.
ALONE = ("MTP, packed and padded", "LoRA, recompute", "MLA, packed", "experts, stash", "fused linear", "TP 2, SP")


@pytest.mark.parametrize("name", times(ALONE, STEPS))
def test_each_patch_alone(name, runs, ranks):
    stock, world = runs(name), STEPS[name].layout.world
    if stock.error and world > 1:
        pytest.skip("one patch is not all that this step needs: a rank that fails would leave the other waiting")
    working = [id for id in device_steps.at_work(runs(name, IDS), IDS) if shown_here(id)]
    alone = ranks[world].run(device_steps.each_counted, name, working)[0]
    told = {id: amiss(stock, run, limits(name, alone=True)) for id, run in alone.items()}
    assert {id: text for id, text in told.items() if text} == {}


CAPTURED = [name for name in STEPS if name not in ("experts", "experts, replay") and STEPS[name].layout.world == 1]


@pytest.mark.once
@pytest.mark.parametrize("name", times(CAPTURED[3::3], CAPTURED))
def test_a_step_is_captured_and_replayed(name, ranks, runs):
    """No host read, no event, no copy that waits while capturing; and no memory of the host that a replay lacks."""
    patched = runs(name, IDS)
    if cannot(name, patched.error):
        pytest.skip(patched.error)
    if patched.counts.host_reads:  # buffers of experts up to 0.12
        assert not of_shim(patched.counts, "host_reads")
        pytest.skip(f"this release reads on the host:\n{patched.counts.told('host_reads')}")
    gradients, wrong = ranks[1].run(device_steps.replayed, name, IDS)[0]
    assert gradients > 2 and wrong == 0


@pytest.mark.once
def test_stock_is_not_captured_on_packed_rows(ranks, runs):
    if runs("MTP, packed").error:
        pytest.skip("stock cannot do this step, captured or not")
    with pytest.raises(testing.RankError, match=r"CaptureError.*while a stream is capturing"):
        ranks[1].run(device_steps.replayed, "MTP, packed", [])


# Planted faults: each of the checks fails for what it is about.


def of_shim_code(source):
    """A function whose lines are those of a patch."""
    space = {"__name__": "shim.patches.megatron_core.planted", "torch": torch, "dist": dist}
    exec(compile(source, "planted.py", "exec"), space)
    return space["planted"]


PLANTED = {
    "host_reads": "def planted(loss):\n    loss.view(-1)[0].item()\n    return loss",
    "blocking_copies": "def planted(loss):\n    return loss * torch.tensor([1.0], device='cuda')",
    "launches": "def planted(loss):\n    return loss * 1",
    "refused_by_nccl": "def planted(loss):\n    dist.all_reduce(torch.ones(1))\n    return loss",
    "CPU": "def planted(loss):\n    return loss + torch.ones(1, 32)",
}


def with_planted(name, what):
    """The runs of a step on stock, and with a fault planted behind the loss."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    stock, compute = device_steps.run_counted(name), LanguageModule.compute_language_model_loss
    planted = of_shim_code(PLANTED[what])
    with pytest.MonkeyPatch.context() as patch:
        faulty = lambda *args: planted(compute(*args))  # noqa: E731
        patch.setattr(LanguageModule, "compute_language_model_loss", faulty)
        return stock, device_steps.run_counted(name)


@pytest.mark.once
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what, ranks):
    stock, faulty = ranks[1].run(with_planted, "dense", what)[0]
    assert not amiss(stock, stock, {})
    assert what.replace("_", " ").partition(" by")[0] in amiss(stock, faulty, {}).replace("_", " ")
