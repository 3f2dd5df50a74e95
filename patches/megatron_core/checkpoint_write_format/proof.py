"""Proof of checkpoint-write-format."""

from __future__ import annotations

import tempfile

import torch

from shim.testing import build_gpt
from shim.testing.proof import Here, proof
from shim.testing.sharded import load, save_anyway


def weights_lost(directory: str) -> int:
    """How many weights of a model another does not have, bit for bit, that was loaded from its checkpoint."""
    saved = build_gpt(seed=1)
    loaded = build_gpt(seed=2)
    save_anyway(saved, directory)
    load(loaded, directory)
    others = dict(loaded.named_parameters())
    return sum(not torch.equal(weight, others[name]) for name, weight in saved.named_parameters())


@proof(
    "{:.0f} weights lost",
    right="all weights as they were saved",
    defect="crash",
    crashes=r"^ModelError: saving, RuntimeError: Worker failure: _write_item\(\) missing .*'serialization_format'",
)
def a_checkpoint_is_saved_with_a_torch_of_today(here: Here) -> int:
    """megatron-core 0.12 saves no checkpoint with torch 2.7 and later.

    To reproduce: save `model.sharded_state_dict()` of a GPTModel by dist_checkpointing.save.

    FileSystemWriterAsync.write_preloaded_data calls `_write_item(*transform_list, stream, data, write_item,
    storage_key)`. In torch 2.7 the function has got serialization_format, without a default, so the writer fails with a
    TypeError. A model that is loaded from the checkpoint should have the weights that were saved. 0.13 passes
    SerializationFormat.TORCH_SAVE.
    """
    with tempfile.TemporaryDirectory() as directory:
        return here.run(weights_lost, directory)[0]
