"""Multimodal rotary positions (mrope) that rotate interleaved pairs.

What is wrong (0.12 to 0.20): MultimodalRotaryEmbedding.forward raises "view size is not compatible with input tensor's
size and stride" with `rotary_interleaved`, because it views a table that is transposed. Behind the error are two more:
the table gets the 3 of time, height and width for its number of tokens, and its sections are cut from interleaved
columns by sizes that count angles. So the two numbers of a pair may turn by different angles, and other angles than
without `rotary_interleaved` take time, height or width.

The patch: upstream's forward makes the table as without `rotary_interleaved`, [s, b, 1, 2 x angles], whose halves are
alike. The first half has the angles, each by its section and cut for the context-parallel rank. The patch writes each
angle twice in a row, which is what rotations of interleaved pairs expect: as RotaryEmbedding does, and the models of
transformers that have such pairs (GLM-4V). Without `rotary_interleaved` nothing happens.

Upstream: open. The dev branch ends the error and has the right shape, but cuts the sections from interleaved columns.

Delete when: every supported release gives the two numbers of a pair one angle, that of its section.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._views import view_with

FORWARD = "megatron.core.models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding.forward"


def _in_pairs(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.rotary_interleaved:
            return original(self, *args, **kwargs)
        angles = original(view_with(self, rotary_interleaved=False), *args, **kwargs).chunk(2, -1)[0]
        return torch.stack((angles, angles), -1).flatten(-2)

    return forward


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    if not module.rotary_interleaved:
        return True
    frequencies = module.inv_freq.double()
    sections = [len(part) for part in frequencies.tensor_split(3)]
    state: Any = sys.modules["megatron.core.parallel_state"]
    cuts = 2 * state.get_context_parallel_world_size() if state.model_parallel_is_initialized() else 2
    # All tokens have one place, so that no cut over ranks changes the table.
    place = torch.tensor([1, 3, 5], device=frequencies.device)
    table = module.forward(place[:, None, None].expand(-1, 1, cuts), sections)
    if module.seq_len_interpolation_factor is not None:
        place = place / module.seq_len_interpolation_factor
    expected = place.repeat_interleave(torch.tensor(sections, device=place.device)) * frequencies
    row = expected.repeat_interleave(2)
    return bool(table.shape[-1] == len(row) and torch.allclose(table.double(), row.expand_as(table), rtol=1e-5))


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FORWARD: _in_pairs}
