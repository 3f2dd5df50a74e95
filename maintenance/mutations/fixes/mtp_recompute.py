"""How a release could recompute layers of multi-token prediction."""

RELEASE = "0.19.2"
LAYER = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer."
CHECKPOINTED, FORWARD = f"{LAYER}_checkpointed_forward", f"{LAYER}forward"
WARN = "        warnings.warn(\"recompute_method == 'block' is not supported for MTP yet. Skipping recompute.\")"
BLOCK = "    elif self.config.recompute_method == 'block':"
ONE = "        assert self.config.recompute_num_layers == 1, 'recompute_num_layers must be 1 for MTP recompute'"
IF = "    if self.config.recompute_granularity == 'full' and self.training:"
FIRST = "self.layer_number <= self.config.recompute_num_layers"

FIXES = {
    "recomputes the first layers of a block": {
        CHECKPOINTED: [
            (ONE, "        pass"),
            (
                BLOCK,
                f"    elif self.config.recompute_method == 'block' and {FIRST}:\n        outputs = checkpoint_handler()\n{BLOCK}",
            ),
        ]
    },
    "asks for the method in forward": {
        CHECKPOINTED: [
            (ONE, "        pass"),
            (
                "    if self.config.recompute_method == 'uniform':",
                f"    if self.config.recompute_method == 'uniform' or {FIRST}:",
            ),
        ],
    },
    "checkpoints a block in forward": {
        FORWARD: [
            (
                IF,
                f"    if self.config.recompute_granularity == 'full' and self.training and self.config.recompute_method == 'block' and {FIRST}:\n"
                "        def run(hidden_states, decoder_input):\n"
                "            return self._proj_and_transformer_layer(hidden_states=hidden_states, decoder_input=decoder_input, attention_mask=attention_mask, padding_mask=padding_mask, rotary_pos_emb=rotary_pos_emb, rotary_pos_cos=rotary_pos_cos, rotary_pos_sin=rotary_pos_sin, attention_bias=attention_bias, inference_params=inference_params, packed_seq_params=packed_seq_params, sequence_len_offset=sequence_len_offset)\n"
                "        hidden_states = tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, hidden_states, decoder_input)\n"
                "        return (hidden_states, input_ids, position_ids, padding_mask)\n" + IF,
            )
        ]
    },
}
PROOFS = {"checkpoints a block in forward": ["the-method-block-recomputes-mtp-layers"]}
