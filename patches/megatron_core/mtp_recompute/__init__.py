"""Full activation recompute of multi-token prediction layers.

What is wrong with recompute_granularity="full":
- 0.12, 0.13: MTP layers are never recomputed and keep all activations.
- 0.14 to 0.20: recompute_num_layers above 1 raises an AssertionError, although the option counts chunks of the decoder.
- 0.14, 0.15: method block raises a NameError, because warnings is not imported. In 0.16 to 0.20 it does not recompute.
- 0.14 to 0.17: packed rows raise a TypeError, because the checkpoint gets packed_seq_params as if it were a tensor.
- 0.18: every step raises a TypeError about padding_mask.
- Frozen base weights (up to 0.18): no input requires a gradient, so adapters in the MTP layer silently do not train.
  From 0.19 on hidden_states requires one.
- FP8: up to 0.17 the checkpoint gets its tensors by name, so its graph does not see them, and with delayed scaling no
  context is entered around the checkpoint. 0.12 reads an attribute that the layer lacks, and knows delayed scaling
  only.
- FP4 (0.15 and later): MTP layers run unquantized, with and without recompute.

The patch: uniform recomputes every MTP layer as a separate chunk. block recomputes the first recompute_num_layers,
counted within the MTP block. The checkpoint saves hidden_states, decoder_input and all else that requires a gradient;
the recomputed function holds the rest. Contexts are those of TransformerBlock: with delayed scaling one around the
checkpoint, and inside it one for the layer, in forward and in recompute. Losses and gradients equal those without
recompute, to the bit.

If a release gives the layer a tensor-parallel group (0.17 and later), the checkpoint gets the same group. From 0.18 on
a hybrid MTP layer also recomputes the layers of its stack, inside the chunk, as upstream does. If one layer serves
all depths (mtp_use_repeated_layer), that layer is number 0 each time.

Upstream: Megatron-LM issues 6760 and 7452 (the group given to the checkpoint); block and recompute_num_layers are open.

Delete when: megatron-core recomputes MTP layers under both methods, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches._views import view_with
from shim.patches.megatron_core._mtp_checkpoint import checkpointed, checkpointed_forward
from shim.patches.megatron_core.mtp_recompute.probe import probe as probe

LAYER = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer."


def _forward(original: Function, quantizes: bool) -> Function:
    """0.12 and 0.13: the checkpoint goes around the whole layer."""
    signature = inspect.signature(original)
    run = original if quantizes else _quantized_as_the_decoder(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and self.config.recompute_granularity == "full"):
            return run(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        return checkpointed(self, functools.partial(run, arguments.pop("self")), arguments)

    return forward


def _quantized_as_the_decoder(original: Function) -> Function:
    """0.12: uses the FP8 context of the decoder's layers instead of the layer's own."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.config.fp8:
            return original(self, *args, **kwargs)
        from megatron.core.fp8_utils import get_fp8_context

        with get_fp8_context(self.config):
            return original(view_with(self, config=view_with(self.config, fp8=None)), *args, **kwargs)

    return forward


def _proj_and_transformer_layer(original: Function) -> Function:
    """From 0.15: enters FP4 as the decoder's layers do. Upstream enters FP8 itself."""

    @functools.wraps(original)
    def _proj_and_transformer_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.fp8 or not getattr(self.config, "fp4", None):  # 0.14, with the same bodies, has no such field
            return original(self, *args, **kwargs)
        from megatron.core.fp4_utils import get_fp4_context

        with get_fp4_context(self.config):
            return original(self, *args, **kwargs)

    return _proj_and_transformer_layer


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {LAYER + "forward": functools.partial(_forward, quantizes=False)},
    "v0_13": {LAYER + "forward": functools.partial(_forward, quantizes=True)},
    "v0_14": {LAYER + "_checkpointed_forward": checkpointed_forward},
    "v0_15": {  # has FP4
        LAYER + "_checkpointed_forward": checkpointed_forward,
        LAYER + "_proj_and_transformer_layer": _proj_and_transformer_layer,
    },
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
