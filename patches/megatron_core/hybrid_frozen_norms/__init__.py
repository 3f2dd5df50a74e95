"""Recompute of norms in hybrid models with adapters behind frozen embeddings.

What is wrong (0.13 to 0.20; 0.12 was not run, because its models need Transformer Engine): if the base weights are
frozen, as under LoRA, the embeddings require no gradient. With recompute_modules=["layernorm"] a norm saves what
its recompute needs only if something in front of it requires a gradient. If the first layer with an adapter has such a
norm in front of the adapter, backward raises a TypeError about a missing argument (StopIteration in 0.20), as in the
models of `frozen-recompute`. Upstream's specs of hybrid models have such norms in layers of experts (from 0.16), and in
those of DSA and multi-latent attention (from 0.19). So it hits adapters that leave out the Mamba layers in front. Up to
0.15 only a spec of one's own has such norms.

The patch makes the hidden states [s, b, h] that enter the stack require a gradient, if none is required yet and the
norm right in front of the first trained weights is recomputed. Otherwise it changes nothing: a Mamba layer with
adapters makes stock right, and costs less memory. Trainers whose hook makes the embeddings require a gradient see no
change.

Upstream: open.

Delete when: norms that are recomputed let their outputs require a gradient, and the releases before that are not
supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches.megatron_core._trained_states import any_trained, from_trained_states

STACKS = {
    "v0_13": "megatron.core.ssm.mamba_block:MambaStack.forward",
    "v0_18": "megatron.core.models.hybrid.hybrid_block:HybridStack.forward",
}


def _forward(original: Function) -> Function:
    return from_trained_states(original, _recomputes_first_norm)


def _recomputes_first_norm(stack: Any) -> bool:
    """Whether the norm right in front of the first trained weights of the stack is recomputed."""
    config = stack.config
    if config.recompute_granularity != "selective" or "layernorm" not in (config.recompute_modules or ()):
        return False
    first: Any = next((layer for layer in stack.layers if any_trained(layer)), None)
    attends = hasattr(first, "self_attention") and any_trained(first.self_attention)
    # A Mamba layer recomputes no norm.
    return bool(getattr(first, "recompute_input_layernorm" if attends else "recompute_pre_mlp_layernorm", False))


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {STACKS[variant]: _forward}
