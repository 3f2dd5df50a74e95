"""The words in which a patch says which models and runs it concerns."""

from __future__ import annotations

__all__ = ["WORDS"]

# A size counts above 1. "any" is every run; "own-code" is one whose trainer calls or subclasses what the patch adds.
WORDS = {
    "any": "every run",
    "own-code": "a trainer's own code",
    "config-override": "shim.config_override",
    "te": "Transformer Engine",
    "no-te": "no Transformer Engine",
    "mtp": "multi-token prediction",
    "moe": "mixture of experts",
    "router-replay": "router replay",
    "expert-bias": "moe_router_enable_expert_bias",
    "padding-mask": "a padding mask",
    "mla": "multi-latent attention",
    "gated-attention": "gated attention",
    "mamba": "Mamba layers, as in hybrid models",
    "gdn": "gated delta net",
    "dsa": "DeepSeek sparse attention",
    "mrope": "multimodal rotary positions",
    "fused-rope": "fused rotary embeddings",
    "fp32-residual": "fp32_residual_connection",
    "max-logit": "log_max_attention_logit",
    "packed": "packed rows (THD)",
    "lora": "LoRA, or other frozen weights",
    "recompute": "activation recompute",
    "label-smoothing": "label smoothing",
    "per-token-loss": "calculate_per_token_loss",
    "fused-loss": "Transformer Engine's fused cross entropy",
    "tp": "tensor parallelism",
    "sp": "sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "layout": "pipeline_model_parallel_layout",
    "ep": "expert parallelism",
    "fp8": "FP8 or FP4",
    "cuda-graph": "CUDA graphs",
    "distributed-optimizer": "the distributed optimizer",
    "offloaded-optimizer": "the CPU-offloaded optimizer",
    "muon": "the Muon optimizer",
    "fsdp": "Megatron-FSDP",
    "param-groups": "parameter groups with separate learning rates",
    "checkpoint": "saving or loading a checkpoint",
    "datasets": "megatron-core's own datasets, such as GPTDataset",
}
