"""offloaded-optimizer-classes: the classes of the offloaded optimizer are loaded, and no other class is."""

import pickle
import sys
import types

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import after_a_checkpoint
from shim.patches.megatron_core.offloaded_optimizer_classes.proof import groups, read, write

CELLS = {"0.17.1": "all"}
ID, RESUME = "offloaded-optimizer-classes", "cpu-offloaded-optimizer"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def patched():
    return shim.patched(only=[ID], require=[ID])


class Foreign(torch.optim.SGD):
    """An optimizer that megatron-core does not know."""


def test_no_other_class_is_loaded(tmp_path):
    """Not even an optimizer, or what the allowed ones are made of."""
    for number, other in enumerate((Foreign, torch.optim.Adagrad, pickle.Pickler)):
        directory = tmp_path / str(number)
        directory.mkdir()
        write(directory, {"class": other})
        with patched(), pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            read(str(directory))


def test_nothing_is_allowed_outside_of_the_load(tmp_path):
    write(tmp_path, {"groups": groups()})
    before = set(torch.serialization.get_safe_globals())
    with patched():
        read(str(tmp_path))
        assert set(torch.serialization.get_safe_globals()) == before
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "common.pt")
        (tmp_path / "common.pt").write_bytes(b"damaged")
        with pytest.raises(pickle.UnpicklingError):
            read(str(tmp_path))
    assert set(torch.serialization.get_safe_globals()) == before


def test_what_others_allow_stays_allowed(tmp_path):
    """As a trainer does that works around it."""
    write(tmp_path, {"groups": groups()})
    with patched(), torch.serialization.safe_globals([torch.optim.AdamW]):
        read(str(tmp_path))
        assert torch.optim.AdamW in torch.serialization.get_safe_globals()


def test_the_class_for_the_gpu_is_that_of_megatron(tmp_path, monkeypatch):
    """As if Transformer Engine were there."""
    from megatron.core import optimizer

    fused = types.ModuleType("fused_adam_of_this_test")
    fused.FusedAdam = type("FusedAdam", (torch.optim.SGD,), {"__module__": fused.__name__})
    monkeypatch.setitem(sys.modules, fused.__name__, fused)
    write(tmp_path, {"groups": groups(fused.FusedAdam)})
    with patched():
        with pytest.raises(pickle.UnpicklingError):
            read(str(tmp_path))
        monkeypatch.setattr(optimizer, "Adam", fused.FusedAdam)
        assert read(str(tmp_path))["groups"][0]["gpu_optimizer_cls"] is fused.FusedAdam


def test_what_stock_does_right_stays(tmp_path):
    write(tmp_path, {"iteration": 3, "weights": torch.ones(2)})
    with patched():
        found = read(str(tmp_path))
    assert found["iteration"] == 3 and found["weights"].tolist() == [1, 1]


@pytest.mark.skipif(testing.release() < "0.15", reason="0.14 has no such format")
@pytest.mark.parametrize("aware", [True, False], ids=["precision-aware", "main params"])
def test_a_training_resumes_bit_for_bit(aware):
    with shim.patched(only=[ID, RESUME], require=[ID, RESUME]):
        assert after_a_checkpoint("fully_reshardable", aware=aware) == 0
