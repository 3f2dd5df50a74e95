"""Proof of mamba-packed-sequences."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_mamba import mamba_on_cpu, mixer_spec
from shim.testing.model import _config
from shim.testing.proof import Here, LacksFeatureError, proof

HIDDEN, LENGTHS = 32, [5, 2, 6]
SMALL = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}


def mixer() -> Any:
    """MambaMixer with local layers, inside `mamba_on_cpu`."""
    from megatron.core import parallel_state

    made: Any = sys.modules["megatron.core.ssm.mamba_mixer"].MambaMixer
    if "packed_seq_params" not in inspect.signature(made.forward).parameters:
        raise LacksFeatureError("Mamba layers of this release take no packed rows")
    config = _config(mtp_num_layers=None, is_hybrid_model=True, **SMALL)
    groups = SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group()
    )
    torch.manual_seed(0)
    return made(config, mixer_spec().submodules, HIDDEN, pg_collection=groups)


def row(padding: int = 0) -> testing.PackedRow:
    """A packed row whose last sequence has padding."""
    return testing.pack(testing.random_sequences(LENGTHS), total=sum(LENGTHS) + padding)


def off(**fields: Any) -> float:
    """How far the outputs of a packed row are from those of its sequences alone. fields: of PackedSeqParams, more."""
    with mamba_on_cpu(), torch.no_grad():
        layer = mixer()
        states: Tensor = torch.randn(sum(LENGTHS), 1, HIDDEN, generator=torch.Generator().manual_seed(1))
        packed = layer(states, packed_seq_params=row().packed_seq_params(**fields))[0]
        alone = torch.cat([layer(part)[0] for part in states.split(LENGTHS)])
        return float((packed - alone).norm() / alone.norm())


@proof("outputs off by {:.1e}", bound=1e-5)
def a_packed_row_is_its_sequences_alone(here: Here) -> float:
    """Mamba layers run on from one sequence of a packed row into the next.

    To reproduce: run a MambaMixer on a row of three sequences, with a PackedSeqParams that has offsets and lacks
    `total_tokens`, and on each sequence alone. (Without a GPU stand-ins in torch take the place of mamba_ssm's norm and
    scan.)

    `PackedSeqParams.__post_init__` fills `seq_idx` only if it knows `total_tokens`, and the mixer takes a missing
    `seq_idx` for one sequence. Right are the outputs of each sequence alone, as in 0.16. From 0.17 on.
    """
    found: float = here.run(off)[0]
    return found
