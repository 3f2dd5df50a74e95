"""Tries an override of MultiTokenPredictionLayer._checkpointed_forward: is one layer recomputed, with its gradients?"""

from __future__ import annotations

from typing import Any

from shim.patches._stubs import holder_of
from shim.patches.megatron_core._mtp_checkpoint import quantized
from shim.patches.megatron_core._mtp_layers import number_in_block
from shim.patches.megatron_core._mtp_tries import runs_full_recompute, tried


def probe(module: Any, method: str, models: list[Any]) -> bool | str | None:
    """See docs/patch-modules.md."""
    name = method.rpartition(".")[2]
    if name == "_proj_and_transformer_layer":
        if module.config.fp8 or not module.config.fp4:
            return True  # the patch does nothing there
        return "shim cannot run FP4 on a tiny input"
    if name != "_checkpointed_forward":
        return "shim has no way to try this method"
    if not runs_full_recompute(module):
        return True
    if quantized(module.config):
        return "shim cannot run FP8 or FP4 on a tiny input"
    step, right = tried(module, None)
    chosen = module.config.recompute_method != "block" or number_in_block(module) < module.config.recompute_num_layers
    # A backward that frees the inputs of checkpoints spares those of the patch. The decoder's backward needs them.
    if not right or step.freed or len(step.rows) != 1 + chosen:
        return False
    weights = {weight.requires_grad for weight in module.parameters()}
    model = holder_of(module, "mtp", models)
    before = [part for part in (getattr(model, name, None) for name in ("embedding", "decoder")) if part is not None]
    if True not in weights or (not before and False not in weights):
        return True
    if any(weight.requires_grad for part in before for weight in part.parameters()):
        return True  # what they train reaches the layer in hidden_states
    try:
        step, right = tried(module, None, trained=False)
    except RuntimeError:
        right = False  # nothing requires a gradient, so backward had nothing to run through
    return right or "the layer is trained only if its inputs require a gradient"
