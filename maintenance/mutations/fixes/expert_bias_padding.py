"""How a release could leave padding out of the counts of experts itself."""

RELEASE = "0.19.2"
BIAS = "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias"
ROUTING = "megatron.core.transformer.moe.router:TopKRouter.routing"
MASKED = "routing_map = routing_map & ~padding_mask"
CALL = "self._apply_expert_bias(routing_map, padding_mask=padding_mask)"

FIXES = {
    "gives the mask a column in a statement of its own": {
        BIAS: [
            (
                "                routing_map = ",
                "                padding_mask = padding_mask.unsqueeze(-1)\n                routing_map = ",
            )
        ]
    },
    "fills the map": {BIAS: [(MASKED, "routing_map = routing_map.masked_fill(padding_mask[:, None], False)")]},
    "makes a mask of the shape of the map": {
        BIAS: [(MASKED, "routing_map = routing_map & ~padding_mask.unsqueeze(-1).expand_as(routing_map)")]
    },
    "takes the rows of tokens": {BIAS: [(MASKED, "routing_map = routing_map[~padding_mask]")]},
    "gives the mask a column before the function uses it": {
        BIAS: [
            (
                "    if self.enable_expert_bias",
                "    padding_mask = None if padding_mask is None else padding_mask.reshape(-1)[:, None]\n"
                "    if self.enable_expert_bias",
            )
        ]
    },
    "counts with weights": {
        BIAS: [
            (MASKED, "routing_map = routing_map.mul((~padding_mask)[:, None])"),
        ]
    },
    "gives the mask a column where it calls": {
        ROUTING: [
            (CALL, CALL.replace("=padding_mask)", "=None if padding_mask is None else padding_mask.unsqueeze(-1))"))
        ]
    },
    "calls without the rows of padding": {
        ROUTING: [
            (CALL, "self._apply_expert_bias(routing_map if padding_mask is None else routing_map[~padding_mask])"),
        ]
    },
}
