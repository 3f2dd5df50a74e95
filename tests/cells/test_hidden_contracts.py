"""What others read of the functions that shim wraps, for every target of every patch, and what a checkpoint keeps."""

import pytest
import torch
from chosen import ONCE
from contract_cases import Watched, broken_contracts, import_targets, places, reported, stand_in_for, step
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CheckpointFunction, CheckpointWithoutOutput

import shim
from shim import testing
from shim._engine.engine import ENGINE
from shim._engine.names import MISSING
from shim.testing import Layout

CELLS = {"0.12.0": "all", "0.19.2": "all"}

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
PLAN = shim.plan()
TARGETS = import_targets(PLAN)
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
# Those that stand between an MTP layer and its checkpoint.
AROUND_CHECKPOINTS = ("mtp-recompute", "config-override", "fp8-fp4-recompute", "mtp-packed-sequences")


@pytest.fixture(scope="module")
def applied():
    with shim.patched() as report:
        yield report


@pytest.mark.parametrize("target", TARGETS)
def test_what_others_read_of_a_function_stays(applied, target):
    """Signature, names, text, attributes, the way to upstream's function, and pickling by name."""
    assert broken_contracts(target) == []


def test_a_wrapper_that_hides_upstream_is_found(applied, monkeypatch):
    """The cases above can fail: this wrapper keeps nothing of what it wraps."""
    target = next(target for target in TARGETS if ENGINE.binder.chains[target].base is not MISSING)
    chain = ENGINE.binder.chains[target]
    bare = type(chain)(chain.target, chain.owner, chain.name, chain.base, lambda *args, **kwargs: None)
    monkeypatch.setitem(ENGINE.binder.chains, target, bare)
    assert len(broken_contracts(target)) >= 5


def test_a_test_may_replace_what_is_bound_and_undo_it(applied):
    """By monkeypatch.setattr, on targets and on aliases: meanwhile shim says so, afterwards all is as it was.

    `make test` asks it of every twelfth, others on another release.
    """
    before = reported()
    for owner, name in list(places())[sum(map(int, VERSION)) % 12 :: 12] if ONCE else places():
        held = vars(owner)[name]
        with pytest.MonkeyPatch.context() as undo:
            undo.setattr(owner, name, stand_in_for(owner, name))
            assert reported() != before, f"{owner}.{name} is replaced, and the report says nothing"
        assert vars(owner)[name] is held, f"{owner}.{name}"
        # Somebody looks before the next is replaced: a patch that was off meanwhile has no aliases that it could miss.
        assert reported() == before, f"{owner}.{name}"


@pytest.mark.once
def test_a_test_may_undo_without_anybody_having_looked(applied):
    before = reported()
    for owner, name in places():
        with pytest.MonkeyPatch.context() as undo:
            undo.setattr(owner, name, stand_in_for(owner, name))
    assert reported() == before


# What a checkpoint is given


@pytest.fixture(scope="module")
def one_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


ROWS = {"unpacked": None, "padded": 4}


@pytest.mark.skipif(VERSION < (0, 14), reason="MTP layers have no checkpoint of their own before 0.14")
@pytest.mark.parametrize("override", [False, True], ids=["", "override"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("only", [None, AROUND_CHECKPOINTS], ids=["all", "around"])
def test_an_mtp_layer_is_in_the_closure_of_what_its_checkpoint_runs(one_rank, only, method, row, override, monkeypatch):
    """A trainer whose backward frees the inputs of checkpoints looks for it there: directly, in a cell."""
    with shim.patched(only=only):
        model = testing.build_gpt(mtp_num_layers=1, recompute_method=method, **FULL)
        watched = Watched(monkeypatch)
        step(model, row, override)
    found = [layer for layer in watched.layers() if layer is not None]
    assert len(found) == 1 and found[0].layer_number == model.mtp.layers[0].layer_number
    assert len(watched.functions) == {"uniform": 3, "block": 2}[method]  # the layers of the decoder, and the MTP layer


def test_a_checkpoint_keeps_the_very_function_where_nothing_is_overridden(one_rank, applied, monkeypatch):
    def double(value):
        return value * 2

    watched = Watched(monkeypatch)
    value = torch.ones(2, requires_grad=True)
    tensor_parallel.checkpoint(double, False, value).sum().backward()
    CheckpointFunction.apply(double, False, value).sum().backward()
    assert all(function is double for function in watched.functions) and len(watched.functions) == 2
    kept = CheckpointWithoutOutput()
    kept.checkpoint(double, value)
    assert kept.run_function is double
