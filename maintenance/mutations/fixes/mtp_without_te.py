"""How a release could build layers of multi-token prediction without Transformer Engine."""

RELEASE = "d98e8a64dd"
ASKS = "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear"
CLASSES = "(InferenceColumnParallelLinear, InferenceLayerNormColumnParallelLinear)"

FIXES = {
    "leaves mocks out": {
        ASKS: [
            (
                f"isinstance(module, {CLASSES})",
                f"isinstance(module, tuple((c for c in {CLASSES} if isinstance(c, type))))",
            )
        ]
    },
    "asks for classes first": {
        ASKS: [("    return ", "    return isinstance(InferenceColumnParallelLinear, type) and ")]
    },
    "answers no where it cannot tell": {
        ASKS: [
            (
                f"    return isinstance(module, {CLASSES})",
                f"    try:\n        return isinstance(module, {CLASSES})\n    except TypeError:\n        return False",
            )
        ]
    },
}
