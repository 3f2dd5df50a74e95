"""How a release could give the padding mask to layers that are not recomputed."""

RELEASE = "0.17.1"
FORWARD = "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward"
DIRECT = "custom(layer_idx, layer_idx + 1)("
CALL = "(hidden_states, attention_mask, context, context_mask, rotary_pos_emb)"
INNER = "hidden_states, attention_mask, context, context_mask, rotary_pos_emb, padding_mask=None):"

FIXES = {
    "gives it by position": {FORWARD: [(CALL, CALL.replace("emb)", "emb, padding_mask)"))]},
    "gives it by name": {FORWARD: [(CALL, CALL.replace("emb)", "emb, padding_mask=padding_mask)"))]},
    "has it as a default": {
        FORWARD: [
            (INNER, INNER.replace("padding_mask=None", "padding_mask=padding_mask")),
        ]
    },
    "takes it from outside where it is not given": {
        FORWARD: [
            (
                "    def custom(start: int, end: int):",
                "    mask_of_row = padding_mask\n\n    def custom(start: int, end: int):",
            ),
            (
                "            for index in range(start, end):",
                "            padding_mask = mask_of_row if padding_mask is None else padding_mask\n            for index in range(start, end):",
            ),
        ]
    },
}
