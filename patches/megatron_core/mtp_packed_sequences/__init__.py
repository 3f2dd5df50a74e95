"""Packed sequences (THD rows) in multi-token prediction.

What is wrong (0.12 to 0.20):
1. 0.12 to 0.15 refuse packed rows with an AssertionError. Under ``python -O`` they train on tokens of the neighbouring
   sequence, and the MTP gradient is off by 4e-2.
2. 0.16 to 0.20 roll inside sequences but read only cu_seqlens_q, while attention and rope use the padded offsets. With
   padding between sequences the gradient is off by 9e-2. Without a loss mask the model trains on padding.
3. Up to 0.16 a row whose targets are all masked gives NaN, and labels=None (RL, inference) raises.
4. 0.14 to 0.18 cannot recompute an MTP layer of a packed row.

The patch leaves cu_seqlens as they are. Inside each sequence, tokens move left by one. The last valid position and the
padding become zero. They count neither in the loss nor in the number of tokens.

The calls by release. A step is one call of the model; its rolls share the packed row and its index (`step`):

    upstream's function                           file: what the patch does there
    --------------------------------------------  ------------------------------------------------------------------
    0.12, 0.13
    MultiTokenPredictionBlock.forward             block: opens the step, adds a loss mask; no labels, no MTP (3)
      roll_tensor, per depth                        rolls: by the row of the step (1); a count of zero is one (3)
      MultiTokenPredictionLayer.forward             block: hides the row from the layer,
        its transformer layer                         and hands it over here (1; refused_row)
    0.14, 0.15
    GPTModel._postprocess                         layer: opens the step, adds a loss mask; no labels, no MTP (3)
      MultiTokenPredictionLayer.forward             layer: hides the row from the layer,
        roll_tensor, of ids and positions             rolls: by the row of the step (1)
        _checkpointed_forward, if recomputed          recompute: works on a packed row (4)
          _proj_and_transformer_layer                   and hands the row over here (1; refused_row)
      roll_tensor, of labels and mask               rolls: by the row of the step (1); a count of zero is one (3)
    0.16
    GPTModel._postprocess                         layer: opens the step, adds a loss mask; no labels, no MTP (3)
      roll_tensor                                   rolls: a count of zero is one (3)
        _roll_tensor_packed_seq                       rolls: one roll that knows padding, for a loop (2)
      ..Layer._checkpointed_forward                 recompute: works on a packed row (4)
    from 0.17
    GPTModel._postprocess, a hybrid's forward     loss: opens the step
      ..Layer._get_embeddings, from 0.18            loss: keeps padding out of the router (2)
      ..Layer._checkpointed_forward, up to 0.18     recompute: works on a packed row (4)
      process_mtp_loss                              loss: opens the step, adds a loss mask (2)
        _roll_tensor_packed_seq, everywhere           rolls: one roll that knows padding, for a loop (2)

`probe` tries overrides for shim.check(). Helpers that mtp-loss-cp and mtp-recompute share lie beside the patches:
_context_parallel_rows and _mtp_checkpoint.

Context parallelism may cut a row over ranks in two ways: each sequence by zigzag (option partition="sequence", the
default), or the row as a whole (partition="row"). 0.12 and 0.13 pass no group to the roll, so the roll uses the group
of parallel_state, also for unpacked rows. Each rank divides by its own count of targets, as upstream does; with
mtp-loss-cp it divides by that of the row. Without mtp-loss-cp, a rank that has no target while others have some takes
part with a loss of zero, as from 0.17 on, and not with NaN. The loss of the row is then too small.

Not covered:
- The expert all-to-all overlap path. A nested function there, which a patch cannot reach, asserts against packed rows.
- partition="row" together with mtp_hsm (0.20) and padding: upstream then takes each sequence for cut by zigzag.

Upstream: Megatron-LM pull requests 6205 and 4494 (padding; open). A variant can go when its releases are no longer
supported.

Delete when: megatron-core reads cu_seqlens_q_padded in its roll, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from shim.ops.context_parallel_roll import PARTITIONS
from shim.patches._arguments import Function
from shim.patches.megatron_core.mtp_packed_sequences.block import patch_block_forward
from shim.patches.megatron_core.mtp_packed_sequences.block import patch_layer_forward as patch_block_layer_forward
from shim.patches.megatron_core.mtp_packed_sequences.layer import patch_layer_forward, patch_postprocess
from shim.patches.megatron_core.mtp_packed_sequences.loss import (
    patch_get_embeddings,
    patch_model_step,
    patch_process_mtp_loss,
)
from shim.patches.megatron_core.mtp_packed_sequences.probe import probe as probe
from shim.patches.megatron_core.mtp_packed_sequences.recompute import patch_checkpointed_forward
from shim.patches.megatron_core.mtp_packed_sequences.rolls import (
    Options,
    patch_count_of_roll_tensor,
    patch_roll_tensor,
    patch_roll_tensor_packed_seq,
)

MTP = "megatron.core.transformer.multi_token_prediction:"
GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
MAMBA = "megatron.core.models.mamba.mamba_model:MambaModel."  # 0.17
HYBRID = "megatron.core.models.hybrid.hybrid_model:HybridModel."  # its name from 0.18

BINDINGS: dict[str, dict[str, Callable[..., Function]]] = {
    "v0_12": {  # the MTP block rolls and computes the loss
        MTP + "roll_tensor": patch_roll_tensor,
        MTP + "MultiTokenPredictionBlock.forward": patch_block_forward,
        MTP + "MultiTokenPredictionLayer.forward": patch_block_layer_forward,
    },
    "v0_14": {  # layers roll their inputs, the model rolls labels and masks
        MTP + "roll_tensor": patch_roll_tensor,
        MTP + "MultiTokenPredictionLayer.forward": patch_layer_forward,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": patch_checkpointed_forward,
        GPT + "_postprocess": patch_postprocess,
    },
    "v0_16": {  # packed rows, by a loop that does not know of padding
        MTP + "roll_tensor": patch_count_of_roll_tensor,
        MTP + "_roll_tensor_packed_seq": patch_roll_tensor_packed_seq,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": patch_checkpointed_forward,
        GPT + "_postprocess": patch_postprocess,
    },
    "v0_17": {  # the loss in a function of its own
        MTP + "_roll_tensor_packed_seq": patch_roll_tensor_packed_seq,
        MTP + "process_mtp_loss": patch_process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": patch_checkpointed_forward,
        GPT + "_postprocess": patch_model_step,
        MAMBA + "forward": patch_model_step,
    },
    "v0_18": {  # a padding mask for the router
        MTP + "_roll_tensor_packed_seq": patch_roll_tensor_packed_seq,
        MTP + "process_mtp_loss": patch_process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._get_embeddings": patch_get_embeddings,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": patch_checkpointed_forward,
        GPT + "_postprocess": patch_model_step,
        HYBRID + "forward": patch_model_step,
    },
    "v0_19": {  # recomputes packed rows itself
        MTP + "_roll_tensor_packed_seq": patch_roll_tensor_packed_seq,
        MTP + "process_mtp_loss": patch_process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._get_embeddings": patch_get_embeddings,
        GPT + "_postprocess": patch_model_step,
        HYBRID + "forward": patch_model_step,
    },
}
BINDINGS["v0_20"] = BINDINGS["v0_19"]  # a roll gives a sum only where asked to


def bindings(variant: str, options: Options) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    if options["partition"] not in PARTITIONS:
        raise ValueError(f"partition is {options['partition']!r}; it must be one of {', '.join(PARTITIONS)}")
    return {target: functools.partial(factory, options=options) for target, factory in BINDINGS[variant].items()}
