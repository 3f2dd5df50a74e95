"""Clamps and offsets of gated activations (activation_func_clamp_value, glu_linear_offset) that fast paths ignore.

What is wrong (0.15 to 0.19): the plain path of a gated MLP clamps both halves to `activation_func_clamp_value` and adds
`glu_linear_offset`, as a model may have been pretrained (SwiGLU with a limit, say). Three other paths ignore what is
set, without a word, so that forward and backward are those of another model:
1. `bias_activation_fusion` with SiLU or GELU, in dense layers, experts and shared experts. With quick GELU, as gpt-oss
   has it, experts do clamp.
2. `use_te_activation_func`, for the clamp and the offset.
3. `moe_shared_expert_overlap`: overlapped shared experts do neither, on any path.

The patch switches the fast paths off in the config of a layer that is built, each of them only if it would ignore what
is set, and says so in a warning. The layer then takes the plain path. Other configs do not change. Layers of
`use_transformer_engine_op_fuser` do not read these fields, and are not covered.

Upstream: Megatron-LM pull request 5940, on the main branch since 2026-08-13, for 0.20. There fused SwiGLU clamps, and
the fast paths that do not are refused.

Delete when: the releases before the one that brings pull request 5940 are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.nn.functional as F

from shim.patches._arguments import Function
from shim.patches.megatron_core._ignored_settings import problems_of, put_off

ID = "clamped-activations"
MLP = "megatron.core.transformer.mlp:MLP.__init__"
MOE = "megatron.core.transformer.moe.moe_layer:MoELayer.__init__"


def _ignored(config: Any) -> Mapping[str, str]:
    if not getattr(config, "gated_linear_unit", False):
        return {}
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if clamp is None and not offset:
        return {}
    # With an offset upstream itself refuses fused SiLU and GELU.
    fused = config.bias_activation_fusion and clamp is not None and config.activation_func in (F.silu, F.gelu)
    found = ["bias_activation_fusion"] if fused else []
    found += [name for name in ("use_te_activation_func", "moe_shared_expert_overlap") if getattr(config, name)]
    return dict.fromkeys(found, f"activation_func_clamp_value={clamp} or glu_linear_offset={offset}")


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: a path that was switched on after the layer was built."""
    return problems_of(models, _ignored)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return dict.fromkeys((MLP, MOE), put_off(ID, _ignored))
