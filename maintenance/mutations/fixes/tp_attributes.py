"""How a release could count attention sinks in the norm by itself."""

RELEASE = "0.19.2"
INIT = "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__"
FILTER = "megatron.core.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate"
MARKED = "if hasattr(param, 'tensor_model_parallel') and param.tensor_model_parallel:"

AFTER = "        if config.perform_initialization:"
FILTER_GRADS = "megatron.core.optimizer.optimizer:MegatronOptimizer._filter_grads_for_norm"
DUPLICATE = "            is_not_gtp_duplicate ="


def after(lines):
    return {INIT: [(AFTER, lines + AFTER)]}


FIXES = {
    "marks sinks by setattr": after(
        "        setattr(self.softmax_offset, 'tensor_model_parallel', True)\n"
        "        setattr(self.softmax_offset, 'partition_dim', 0)\n"
        "        setattr(self.softmax_offset, 'partition_stride', 1)\n"
    ),
    "marks sinks by the function for weights": after(
        "        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes\n"
        "        set_tensor_model_parallel_attributes(self.softmax_offset, world_size > 1, 0, 1)\n"
    ),
    "has a mark of its own for the norm": {
        **after("        self.softmax_offset.counts_on_each_rank = True\n"),
        FILTER: [
            (
                f"    {MARKED}",
                f"    if getattr(param, 'counts_on_each_rank', False):\n        return True\n    {MARKED}",
            )
        ],
    },
    "asks where it filters gradients": {
        **after("        self.softmax_offset.counts_on_each_rank = True\n"),
        FILTER_GRADS: [
            (
                DUPLICATE,
                "            is_not_tp_duplicate = is_not_tp_duplicate or getattr(param, 'counts_on_each_rank', False)\n"
                + DUPLICATE,
            )
        ],
    },
}
