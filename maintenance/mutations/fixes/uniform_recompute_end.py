"""How a release could end the last chunk of uniform recompute where the layers end."""

RELEASE = "0.16.1"
BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
FORWARD, GET = f"{BLOCK}._checkpointed_forward", f"{BLOCK}._get_layer"
END = "layer_idx + self.config.recompute_num_layers"
CALL = f"            hidden_states, context = checkpoint_handler(custom(layer_idx, {END}))"

FIXES = {
    "takes the smaller end": {
        FORWARD: [(f"custom(layer_idx, {END})", f"custom(layer_idx, min({END}, len(self.layers)))")]
    },
    "cuts the end in a statement": {
        FORWARD: [
            (
                CALL,
                f"            end = {END}\n            if end > self.num_layers_per_pipeline_rank:\n                end = self.num_layers_per_pipeline_rank\n"
                "            hidden_states, context = checkpoint_handler(custom(layer_idx, end))",
            )
        ]
    },
    "ends inside the chunk": {
        FORWARD: [
            (
                "for index in range(start, end):",
                "for index in range(start, min(end, self.num_layers_per_pipeline_rank)):",
            )
        ]
    },
    "leaves the loop": {
        FORWARD: [
            (
                "                layer = self._get_layer(index)",
                "                if index >= len(self.layers):\n                    break\n                layer = self._get_layer(index)",
            )
        ]
    },
    "gives a layer that does nothing": {
        GET: [
            (
                "    return self.layers[layer_number]",
                "    if layer_number >= len(self.layers):\n"
                "        return lambda hidden_states, context=None, **rest: (hidden_states, context)\n"
                "    return self.layers[layer_number]",
            )
        ]
    },
}
