"""Functions of shim's that a patch manager puts back on their names after revert() do what stock does.

As MindSpeed's does, which keeps what it finds on a name, and puts that back on all names when it is told to end.
"""

import functools
import types

import pytest
import torch
from contract_cases import import_targets
from thorough import in_full

import shim
from shim import testing
from shim._engine.aliases import find_aliases, rewrap, unwrap
from shim._engine.engine import ENGINE
from shim.testing import Layout

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {
    "packed": {"mtp_num_layers": None},
    "packed, recompute": {"mtp_num_layers": None, **FULL},
    "packed, mtp": {"mtp_num_layers": 1},
}


def _managed(found):
    @functools.wraps(found)
    def managed(*args, **kwargs):
        return found(*args, **kwargs)

    return managed


class Manager:
    """Wraps what stands on the targets of shim, and on all names that hold the same object."""

    def __init__(self):
        self.kept = []

    def apply(self):
        found = [unwrap(vars(chain.owner).get(chain.name)) for chain in ENGINE.binder.chains.values()]
        theirs = {id(inner): _managed(inner) for inner in found if type(inner) is types.FunctionType}
        for owner, name, raw in find_aliases([inner for inner in found if id(inner) in theirs]):
            self.kept.append((owner, name, raw))
            setattr(owner, name, rewrap(raw, theirs[id(unwrap(raw))]))

    def remove(self):
        for owner, name, raw in self.kept:
            setattr(owner, name, raw)


def outcome(options):
    """Losses and gradients of a packed row without padding, or the refusal of a release that trains no such rows."""
    with testing.layout_initialised(Layout()):
        torch.manual_seed(0)
        model = testing.build_gpt(**options)
        try:
            found = testing.run_packed(model, testing.pack(testing.random_sequences((5, 7, 4))))
        except AssertionError as error:
            return str(error)
    return [found.main, *found.mtp, *found.grads.values()]


def same(one, other):
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def put_back():
    """Training of each model on stock; then shim is applied, managed, reverted, and the manager has ended."""
    import_targets(shim.plan())
    stock = {name: outcome(options) for name, options in MODELS.items()}
    manager = Manager()
    try:
        shim.apply()
        manager.apply()
        shim.revert()
        manager.remove()
        yield stock, manager
    finally:
        there = [(owner, name, vars(owner)[name]) for owner, name, _ in manager.kept if name in vars(owner)]
        for owner, name, value in there:
            upstream = ENGINE.beneath(value)
            if upstream is None:
                delattr(owner, name)
            elif upstream is not value:
                setattr(owner, name, upstream)
        shim.revert()


@in_full
def test_training_is_stocks_to_the_bit_and_no_patch_is_called_applied(put_back):
    stock, manager = put_back
    values = [unwrap(vars(owner)[name]) for owner, name, _ in manager.kept]
    ours = [value for value in values if ENGINE.beneath(value) is not value]
    assert len(ours) > 20  # functions of shim's are on these names again
    # Under a name that the release lacks there is nothing of upstream's to do.
    assert not [v for v in ours if v not in ENGINE.binder.wrappers._inert and ENGINE.beneath(v) is not None]
    for name, options in MODELS.items():
        assert same(outcome(options), stock[name]), name
    report = shim.status()
    assert not report.applied and not report.lost
    assert all(report[id].state == "excluded" for id in report if shim.plan()[id].wanted)
