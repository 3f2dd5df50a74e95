"""checkpoint-write-format: which releases need it, and that it holds on ranks and beside a trainer's own fix."""

from importlib import import_module

import pytest
import torch.distributed.checkpoint.filesystem as torchs
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.checkpoint_write_format import WRITE_ITEM, bindings
from shim.patches.megatron_core.checkpoint_write_format.proof import weights_lost
from shim.testing.proof import Here
from shim.testing.sharded import WRITER

CELLS = {"0.12.0": "all"}

ID = "checkpoint-write-format"
pytestmark = needed(ID)
HERE = Here(world=2)


def applied():
    return shim.patched(only=[ID], require=[ID])


def test_two_ranks_save_their_parts(tmp_path):
    with applied():
        assert HERE.run(weights_lost, str(tmp_path), layout=testing.Layout(tp=2)) == [0, 0]


def test_torchs_own_function_stays():
    writer, original = import_module(WRITER), torchs._write_item
    with applied():
        assert torchs._write_item is original and writer._write_item is not original
    assert writer._write_item is original


@pytest.mark.parametrize("first", ["trainer", "shim"])
def test_a_trainers_own_fix_may_stay(tmp_path, monkeypatch, first):
    """Some carry one. It gives the argument where the call has none."""
    writer = import_module(WRITER)

    def fix():
        beneath = writer._write_item

        def fixed(*args, **kwargs):
            return beneath(*args, **{"serialization_format": torchs.SerializationFormat.TORCH_SAVE, **kwargs})

        monkeypatch.setattr(writer, "_write_item", fixed)

    if first == "trainer":
        fix()
    with applied():
        if first == "shim":
            fix()
        assert HERE.run(weights_lost, str(tmp_path)) == [0]
        monkeypatch.undo()


def test_an_older_torch_stays_as_it_is():
    """This function has the parameters of torch 2.6."""

    def older(transforms, stream, data, write_item, storage_key):
        raise NotImplementedError

    assert bindings("v0_12", {})[WRITE_ITEM](older) is older
