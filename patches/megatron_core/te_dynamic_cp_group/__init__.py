"""The context-parallel group of one batch, given back after it.

What is wrong (0.16 to 0.20): a batch may bring its own context-parallel group in `packed_seq_params.cp_group`, or none
with `local_cp_size=1` (dynamic, or hybrid, context parallelism). TEDotProductAttention sets it on the layer and leaves
it there. A later batch without one, as of an evaluation or a rollout, attends over the last group that came along, in
silence. And a model with context_parallel_size=1 has no stream for the ring of ranks, so that its first group raises.

The patch: after such a batch the layer has its own group again, also after an error. A group of several ranks gets the
stream that stock makes for other models. Batches without a group run as on stock.

Rotary embeddings of packed rows (THD) take the layer's own group, here as on stock; megatron-core's own hybrid context
parallelism gives rows of one sequence, which are rotated by theirs (docs/left.md).

Upstream: fixed on main by pull request 5215 (the group) and 6821 (the stream), both in no release.

Delete when: a release gives the group back, and those before it are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument

MODULE = "megatron.core.extensions.transformer_engine"
FORWARD = f"{MODULE}:TEDotProductAttention.forward"
SETTINGS = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")


def _forward(original: Function) -> Function:
    row_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None or (row.cp_group is None and row.local_cp_size is None):
            return original(*args, **kwargs)
        layer = args[0]
        own = [getattr(layer, name) for name in SETTINGS]
        attention: Any = sys.modules[MODULE].__dict__["TEDotProductAttention"]
        if attention.cp_stream is None and row.cp_group is not None and row.cp_group.size() > 1:
            attention.cp_stream = torch.cuda.Stream()
        try:
            return original(*args, **kwargs)
        finally:
            layer.set_context_parallel_group(*own)

    return forward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FORWARD: _forward}
