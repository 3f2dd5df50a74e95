"""Proofs of mtp-tied-checkpoint: a model of two stages is saved, and loaded by one rank and by two stages."""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import Any

from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import CannotRunError, Here, proof
from shim.testing.sharded import load, save


class Saved:
    """What is saved and loaded of this rank's stage."""

    def __init__(self, tied: bool, seed: int) -> None:
        model: dict[str, Any] = {"num_layers": 2, "mtp_num_layers": 1, "share_embeddings_and_output_weights": tied}
        self.stage: Any = testing.build_gpt(seed=seed, **model)

    def sharded_state_dict(self) -> dict[str, Any]:
        return {"model": self.stage.sharded_state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = self.stage.load_state_dict(state["model"], strict=False).missing_keys
        if any("_extra_state" not in name for name in missing):
            raise RuntimeError(f"the checkpoint lacks {missing}")

    def heads(self) -> dict[str, Tensor]:
        """The embeddings, and the output layer if it has a weight of its own."""
        found = {"embeddings": self.stage.embedding.word_embeddings.weight.detach()}
        weight = self.stage.output_layer.weight if self.stage.post_process else None
        if weight is not None and not self.stage.share_embeddings_and_output_weights:
            found["output layer"] = weight.detach()
        return found


def saved(directory: str, tied: bool) -> None:
    save(Saved(tied, seed=7), directory)


def off(directory: str, tied: bool) -> float:
    """How far a stage of other weights, which loads the file, is from one of the weights that were saved."""
    stage = Saved(tied, seed=8)
    load(stage, directory)
    right = Saved(tied, seed=7).heads()
    return max(float((weight - right[name]).norm()) for name, weight in stage.heads().items())


def after_a_file(here: Here, tied: bool) -> float:
    loader: Any = import_module("megatron.core.dist_checkpointing.strategies.torch")
    if not hasattr(loader, "CheckpointableShardedTensor"):
        raise CannotRunError("the loader of this release refuses two copies of a weight on a rank: nothing fixes it")
    with tempfile.TemporaryDirectory() as directory:
        here.run(saved, directory, tied, layout=Layout(pp=2))
        found = [*here.run(off, directory, tied), *here.run(off, directory, tied, layout=Layout(pp=2))]
    return max(found)


@proof(
    "weights off by {:.1e}",
    right="all weights are those saved",
    ranks=2,
    defect="crash",
    crashes=r"^ModelError: saving, (AssertionError|TypeError)",
)
def tied_embeddings_are_saved_and_loaded(here: Here) -> float:
    """A model with multi-token prediction and tied embeddings over pipeline stages cannot be saved.

    To reproduce: build a GPTModel with `mtp_num_layers=1` and `share_embeddings_and_output_weights=True` on two
    pipeline stages, and call `sharded_state_dict()` on both.

    `tie_embeddings_and_output_weights_state_dict` of the last stage asserts that the output layer has no weight. It has
    one, which is not used, because `skip_weight_param_allocation` asks for the first stage alone. Right is a checkpoint
    that has the embeddings once, and that one rank and two stages load. From 0.12 on.
    """
    return after_a_file(here, tied=True)


@proof(
    "weights off by {:.1e}",
    right="all weights are those saved",
    ranks=2,
    defect="crash",
    crashes=r"^ModelError: saving, TypeError: 'NoneType' object is not subscriptable",
    variants=["v0_16"],
)
def a_call_without_metadata(here: Here) -> float:
    """A model with multi-token prediction over pipeline stages raises in `sharded_state_dict()` without metadata.

    To reproduce: build a GPTModel with `mtp_num_layers=1` on two pipeline stages, and call `sharded_state_dict()`.

    `GPTModel.sharded_state_dict` of the last stage reads `metadata["dp_cp_group"]`, and metadata is None. The base
    class has a default for it, as have 0.15 and 0.17. In 0.16 alone.
    """
    return after_a_file(here, tied=False)
