"""The fused down-projection of multi-latent attention under tensor parallelism.

What is wrong (0.17 and 0.18): with `mla_down_proj_fusion` one column-parallel layer projects to the compressed query,
the compressed key and value, and the rotary key. A tensor-parallel rank has its part of the columns.
FusedMLASelfAttention splits what it gets at the sizes of the whole, and the first forward pass raises a RuntimeError.

The patch splits at the sizes of a rank's parts, and gathers the query, as 0.19 does and as the unfused layer does. The
checkpoint has a rank's rows in the same order already. On one rank upstream's function runs as it is.

The gradient of the rotary key is the matter of mla-rope-key-gradient, as for the unfused layer.

Upstream: fixed in 0.19 by pull request 5383.

Delete when: megatron-core 0.18 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

TARGET = "megatron.core.transformer.multi_latent_attention:FusedMLASelfAttention._qkv_down_projection"


def _qkv_down_projection(original: Function) -> Function:
    @functools.wraps(original)
    def _qkv_down_projection(self: Any, hidden_states: Any) -> Any:
        ranks, config = self.tp_group.size(), self.config
        if ranks == 1:
            return original(self, hidden_states)
        sizes = config.q_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim
        qkv, _ = self.linear_qkv_down_proj(hidden_states)
        if qkv.size(-1) == sum(sizes):  # a projection that each rank has all of
            return tuple(qkv.split(sizes, -1))
        query, key_value = qkv.split([size // ranks for size in sizes], -1)
        mappings = sys.modules["megatron.core.tensor_parallel.mappings"]
        query = mappings.gather_from_tensor_model_parallel_region(query)
        if config.sequence_parallel:
            query = mappings.scatter_to_sequence_parallel_region(query)
        return query, key_value

    return _qkv_down_projection


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _qkv_down_projection}
