"""How a release could train adapters behind frozen embeddings under recompute."""

RELEASE = "0.19.2"
FUNCTION = "megatron.core.recompute:checkpointed_forward"
FORWARD = "megatron.core.transformer.transformer_block:TransformerBlock.forward"
ARGS = "        args = (hidden_states, attention_mask,"
MADE = "    if self.config.sequence_parallel:"
TRAINS = "torch.is_grad_enabled() and any((p.requires_grad for p in self.layers.parameters()))"

FIXES = {
    "makes the states of each chunk require a gradient": {
        FUNCTION: [
            (
                ARGS,
                "        if use_checkpoint and (not hidden_states.requires_grad):\n            hidden_states.requires_grad_(True)\n"
                + ARGS,
            )
        ]
    },
    "adds a zero that requires a gradient": {
        FUNCTION: [
            (
                "    if extract_layer_indices is None:",
                "    if not hidden_states.requires_grad:\n"
                "        hidden_states = hidden_states + hidden_states.new_zeros((), requires_grad=True)\n"
                "    if extract_layer_indices is None:",
            )
        ]
    },
    "makes what the block is given require a gradient": {
        FORWARD: [
            (
                MADE,
                f"    if not hidden_states.requires_grad and {TRAINS}:\n        hidden_states = hidden_states.detach().requires_grad_(True)\n"
                + MADE,
            )
        ]
    },
    "makes a leaf of another name": {
        FORWARD: [
            (
                MADE,
                f"    if not hidden_states.requires_grad and {TRAINS}:\n        leaf = hidden_states.clone()\n        leaf.requires_grad = True\n        hidden_states = leaf\n"
                + MADE,
            )
        ]
    },
}
# The release's own checkpoint of norms is another function.
PROOFS = {
    what: ["adapters-behind-frozen-embeddings-are-trained"] for what, changed in FIXES.items() if FUNCTION in changed
}
