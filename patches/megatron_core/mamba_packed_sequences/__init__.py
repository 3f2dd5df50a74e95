"""Packed rows of Mamba layers, of which the caller has not said how many tokens they have.

What is wrong (0.17 to 0.20): MambaMixer takes the number of each token's sequence from `packed_seq_params.seq_idx`.
PackedSeqParams fills that field only if it is given `total_tokens`, which no layer but this one needs. Without it the
convolution and the state run on from one sequence into the next, in silence. 0.16 computes the numbers in the mixer.

The patch computes the numbers from the offsets in the mixer, if the row brings none: a token belongs to the sequence
whose padded offsets enclose it, and tokens behind the last one to another. The caller's row stays as it is.

Upstream: open.

Delete when: a release runs Mamba layers on rows without `total_tokens`, and those before it are not supported.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

TRAINING = "megatron.core.ssm.mamba_mixer:MambaMixer._ssm_training"


def _ssm_training(original: Function) -> Function:
    states_of, row_of = argument(original, "zxBCdt"), argument(original, "packed_seq_params")
    with_row = replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def _ssm_training(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None or row.seq_idx is not None:
            return original(*args, **kwargs)
        offsets = row.cu_seqlens_q if row.cu_seqlens_q_padded is None else row.cu_seqlens_q_padded
        if offsets is None:
            return original(*args, **kwargs)
        row = copy.copy(row)  # a captured graph has to read the offsets of each replay
        tokens = torch.arange(len(states_of(args, kwargs)), device=offsets.device)
        row.seq_idx = torch.bucketize(tokens, offsets[1:], right=True, out_int32=True)[None]
        args, kwargs = with_row(args, kwargs, row)
        return original(*args, **kwargs)

    return _ssm_training


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TRAINING: _ssm_training}
