"""Packed rows are rotated without a loop over sequences.

What is slow (0.12 to 0.19): the unfused rotation of a packed (THD) row rotates sequence by sequence (0.12 to 0.14,
0.19) or slices the table sequence by sequence (0.15 to 0.18). Each sequence costs a host read.

The patch gathers the row of the table for each token (shim.ops.rope). Upstream's function for unpacked rows then
rotates the whole row at once. The result has the same bits, forward and backward. Large rows are rotated in a few
pieces, so temporaries stay as small as those of upstream's loop. Keys take the rows that queries have found, and the
layers of a transformer block share what is found for the sequences, and so do the layers that a backward pass
recomputes. Layers elsewhere, as of multi-token prediction or of a hybrid model, find it once each.

Up to 0.14 the table has a row per position. From 0.15 on, a table with as many rows as the packed row has tokens has a
row per token (multimodal embeddings). Upstream's loop reads it the same way.

Upstream: 0.20 rotates packed rows without a loop.

Delete when: megatron-core rotates packed rows without a loop, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches.megatron_core._packed_rotation import ROPE, of_one_pass, rotate_as_one
from shim.patches.megatron_core._rotation_tries import Operations, Rotation, configs_of, is_cut, plain_config

BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock.forward"
VARIANTS = {"v0_12": False, "v0_15": True}  # whether a table may have a row for each token


def probe(function: Function, target: str, models: list[Any]) -> bool | str:
    """Does the rotation of a packed row take more operations for more sequences? See docs/patch-modules.md."""
    if isinstance(function, torch.nn.Module):
        return True  # a block with a forward of its own has no loop either: each layer finds the rows
    if is_cut(target):
        return "shim cannot rotate a whole row on a rank that has a part of it"
    config, counts = (configs_of(models) or [plain_config()])[0], []
    for lengths in ((7, 9), (1, 3) * 4):
        rotation = Rotation("", packed=True, lengths=lengths)
        with Operations() as counted:
            made = rotation.call(function, target, config)
        counts.append(counted.count)
        if not rotation.is_right(made):
            return "it rotates packed rows to other values than each sequence alone"
    return counts[0] == counts[1]


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    found = {ROPE + "_apply_rotary_pos_emb_thd": functools.partial(rotate_as_one, row_per_token=VARIANTS[variant])}
    # The loop of releases before takes more than all that layers could share.
    return found if variant == "v0_12" else {**found, BLOCK: of_one_pass}
