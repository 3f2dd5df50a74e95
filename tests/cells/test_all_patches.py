"""All patches together, as a trainer gets them by `shim.apply()`, on a real release: stock's training is not
touched, and revert leaves nothing."""

import json

import pytest
import torch
from contract_cases import can_be_imported, import_targets

import shim
from shim import testing
from shim._engine.engine import ENGINE
from shim._engine.names import MISSING
from shim._tools.cli import main
from shim.testing import Layout

CELLS = "every"

IN_FORCE = ("applied", "upstream", "not-needed", "inactive", "excluded", "not-installed")
ROUNDS = "chunked-logprob"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# What stock does right on every release, so that every bit must stay.
MODELS = {
    "plain": {"mtp_num_layers": None},
    "recompute": {"mtp_num_layers": None, **FULL},
    "learned": {"mtp_num_layers": None, "position_embedding_type": "learned_absolute"},
    "mtp": {"mtp_num_layers": 1},
}
# On each release in `make test`; what these two do to a plain model, and positions that are learned, on one.
EVERYWHERE = ("recompute", "mtp")


@pytest.fixture(autouse=True, scope="module")
def everything_is_loaded():
    """Nothing waits for the import of a module that no model needs."""
    import_targets(shim.plan())


def trained(options):
    """Losses of three steps of SGD, all parameters after them, and the model."""
    torch.manual_seed(0)
    model = testing.build_gpt(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12).expand(2, 12)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens[:, :12], positions, None, labels=tokens[:, 1:], loss_mask=torch.ones(2, 12)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [parameter.detach().clone() for parameter in model.parameters()], model


def amiss_in(report):
    """What is not in force, of the patches whose modules can be imported here."""
    found = [id for id in report if report[id].state not in IN_FORCE]
    return [id for id in found if can_be_imported(shim.plan()[id])]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYWHERE else pytest.mark.once) for name in MODELS]
)
def test_stock_training_is_what_it_was_under_all_patches(name):
    """Bit for bit but for chunked-logprob, which computes the same cross entropy in another order."""
    options = MODELS[name]
    with testing.layout_initialised(Layout()):
        losses, parameters, _ = trained(options)
        with shim.patched(exclude=[ROUNDS]) as report:
            assert report.applied and not amiss_in(report), str(report)
            found_losses, found_parameters, _ = trained(options)
        assert torch.equal(losses, found_losses)
        assert all(map(torch.equal, parameters, found_parameters))
        with shim.patched() as report:
            found_losses, found_parameters, model = trained(options)
            assert report[ROUNDS].state == "applied"
            assert not amiss_in(shim.check(model))
    torch.testing.assert_close(found_losses, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found_parameters, parameters, rtol=1e-6, atol=1e-6)


def test_what_is_reverted_was_never_there():
    before = shim.plan()
    targets = {
        t: ENGINE.binder.resolve(t, may_be_missing=True)
        for d in before.decisions.values()
        for t in d.targets
        if loaded(t)
    }
    shim.apply()
    try:
        written = {slot.target for slot in ENGINE.binder.slots.values()}
        assert written <= set(targets) and written
    finally:
        shim.revert()
    for target, (owner, name, value) in targets.items():
        assert ENGINE.binder.resolve(target, may_be_missing=True)[2] is value, f"{owner}.{name}"
        assert value is not MISSING or name not in vars(owner)
    assert not ENGINE.binder.slots and not ENGINE.binder.chains


def test_the_command_status_says_what_is_applied_here(capsys, monkeypatch):
    """With the shipped matrix. It is the one command that imports megatron: the others are in test_commands.py."""
    monkeypatch.setenv("MEGATRON_SHIM_ROUNDING", "1")
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert text.startswith(f"{len(report['applied'])} patches applied")
    right = ("applied", "upstream", "not-needed", "not-installed")
    amiss = [id for id, patch in report["patches"].items() if patch["state"] not in right]
    assert not any(can_be_imported(shim.plan()[id]) for id in amiss), amiss


def loaded(target):
    return ENGINE.binder.loaded(target.partition(":")[0]) is not None
