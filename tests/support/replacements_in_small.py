"""Functions that trainers put in the place of megatron-core's, written anew and as small as shows what they do.

Read in the repositories of ROLL, and in those of other trainers that carry a step of their own:

- ROLL: HybridDeviceOptimizer._update_fp32_params_by_new_state, GPTModel._postprocess and
  MultiTokenPredictionLayer._get_embeddings as attributes of the classes, with the roll taken by name before; and a
  rotation of packed rows that takes a row per token and cuts no table, in the modules that call it.
- a GPTModel._preprocess that asks for the context-parallel ranks itself.
"""

import functools
import importlib
import sys

from trainers_in_small import GPT, MTP, ROPE

HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"


def name_of(trainer):
    """How messages name the function that one of these puts on a name: byte code has qualified names from 3.11 on."""
    return trainer.__name__ if sys.version_info >= (3, 11) else f"{__name__}._"


def roll_fp32_copies(undo, seen):
    """Skips what has no copy in fp32."""

    def _update_fp32_params_by_new_state(self):
        seen.append("_update_fp32_params_by_new_state")
        for weight, state in self.state.items() if self.param_update_in_fp32 else ():
            if weight in self.param_to_fp32_param:
                self.param_to_fp32_param[weight].data.copy_(state["master_param"])

    undo.set(
        sys.modules[HYBRID].HybridDeviceOptimizer, "_update_fp32_params_by_new_state", _update_fp32_params_by_new_state
    )


def roll_step(undo, seen, rolls=True):
    """The loss of one depth, by upstream's roll with the row. rolls: False for one that knows of no sequences."""
    mtp, roll = sys.modules[MTP], sys.modules[MTP].roll_tensor

    def _postprocess(
        self,
        hidden_states,
        input_ids,
        position_ids,
        labels,
        rotary_pos_emb,
        rotary_pos_cos,
        rotary_pos_sin,
        mtp_in_postprocess=None,
        loss_mask=None,
        attention_mask=None,
        packed_seq_params=None,
        extra_block_kwargs=None,
        **others,
    ):
        seen.append("_postprocess")
        moved = functools.partial(roll, shifts=-1, dims=-1, cp_group=None, packed_seq_params=packed_seq_params)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if mtp_in_postprocess:
            hidden_states = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
            )
        states, deeper = hidden_states.chunk(2)
        mask = labels.new_ones(labels.shape) if loss_mask is None else loss_mask
        targets = moved(labels)[0] if rolls else labels.roll(-1, -1)
        mask, count = moved(mask) if rolls else (mask, mask.sum())
        loss = mask * self.compute_language_model_loss(targets, self.output_layer(deeper, weight=weight)[0])
        states = mtp.MTPLossAutoScaler.apply(states, self.config.mtp_loss_scaling_factor * loss / max(count, 1))
        return self.compute_language_model_loss(labels, self.output_layer(states, weight=weight)[0])

    undo.set(sys.modules[GPT].GPTModel, "_postprocess", _postprocess)


def wrong_step(undo, seen):
    """The same with a roll of the row as a whole."""
    roll_step(undo, seen, rolls=False)


def roll_embeddings(undo, seen):
    roll = sys.modules[MTP].roll_tensor

    def _get_embeddings(self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, **others):
        seen.append("_get_embeddings")
        moved = functools.partial(roll, shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
        input_ids, position_ids = moved(input_ids)[0], moved(position_ids)[0]
        mask = [
            moved(value)[0] if value is not None else None for key, value in others.items() if key == "padding_mask"
        ]
        return input_ids, position_ids, *mask, embedding(input_ids=input_ids, position_ids=position_ids), hidden_states

    undo.set(sys.modules[MTP].MultiTokenPredictionLayer, "_get_embeddings", _get_embeddings)


def roll_rotation(undo, seen):
    rope = sys.modules[ROPE]
    unpacked = rope._apply_rotary_pos_emb_bshd

    def a_row_per_token(t, freqs, config, cu_seqlens=None, **others):
        seen.append("apply_rotary_pos_emb")
        if cu_seqlens is None:
            return unpacked(t, freqs, rotary_interleaved=config.rotary_interleaved)
        return unpacked(t[:, None], freqs, rotary_interleaved=config.rotary_interleaved).squeeze(1)

    for module in (rope, importlib.import_module("megatron.core.transformer.attention")):
        undo.set(module, "apply_rotary_pos_emb", a_row_per_token)


def asking_preprocess(undo, seen):
    """Notes how many context-parallel ranks the row is cut over, and makes the table as upstream does."""

    def _preprocess(
        self,
        input_ids,
        position_ids,
        decoder_input=None,
        inference_context=None,
        packed_seq_params=None,
        padding_mask=None,
    ):
        group = getattr(packed_seq_params, "cp_group", None)
        seen.append((group or self.rotary_pos_emb.cp_group).size())
        states = self.embedding(input_ids=input_ids, position_ids=position_ids)
        table = self.rotary_pos_emb(position_ids, self.mrope_section, cp_group=group)
        return states, table, None, None, None, padding_mask

    undo.set(sys.modules[GPT].GPTModel, "_preprocess", _preprocess)
