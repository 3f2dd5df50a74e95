"""The sequence auxiliary loss of a router (moe_router_load_balancing_type="seq_aux_loss") of a packed row.

What is wrong (0.12 to 0.20): the loss is the mean over the sequences of a microbatch, each balanced alone. A packed row
has several sequences side by side, and the router takes it for one: it balances the row, with the padding between its
sequences. A sequence is trained otherwise than alone, by whatever stands beside it in the row.

The patch computes the loss of a packed row from its sequences. A router never sees the offsets of the row, so they are
carried to it:

    upstream's function                     file: what the patch does there
    --------------------------------------  ---------------------------------------------------------------------------
    TransformerLayer.forward                carried: holds the packed row of the call
      MoELayer.forward                      carried: holds it in the recompute of the layer (recompute_modules "moe")
        TopKRouter._apply_seq_aux_loss      loss: the loss of the row's sequences, from 0.14 on
        sequence_load_balancing_loss_func   loss: the same, up to 0.13

The loss is the mean over sequences. With calculate_per_token_loss each counts with its tokens, as it does if it is a
microbatch of its own. Padding between sequences is in no sequence. Counts of all ranks that share the row are added up
by one message, as on stock, which has a number for each expert of each sequence.

Nothing changes without packed rows or with another kind of loss. Whoever wants the row balanced as a whole chooses
"aux_loss", or excludes this patch.

Not covered: a row of dynamic context parallelism, whose ranks are not those that the router adds up over; the recompute
of a layer with CUDA graphs in a part of it.

Upstream: 0.19 takes a row with `tokens_per_sample` apart into samples of equal length (issue 5696). The rest is open.

Delete when: megatron-core balances the sequences of packed rows, and the releases before that are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches.megatron_core.packed_seq_aux_loss import carried, loss

LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer.forward"
MOE = "megatron.core.transformer.moe.moe_layer:MoELayer.forward"
ROUTER = "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss"
LOSS = "megatron.core.transformer.moe.moe_utils:sequence_load_balancing_loss_func"


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. Without this kind of loss there is nothing to carry."""
    if not module.config.num_moe_experts or "seq_aux_loss" not in module.config.moe_router_load_balancing_type:
        return True
    return "shim cannot see whether the packed row of the call reaches the router"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    held: dict[str, Callable[[Function], Function]] = {
        LAYER: carried.patch_layer_forward,
        MOE: carried.patch_moe_forward,
    }
    if variant == "v0_12":
        return {**held, LOSS: loss.patch_sequence_load_balancing_loss_func}
    return {**held, ROUTER: loss.patch_apply_seq_aux_loss}
