"""config.json of a model as Hugging Face has it: what the model is, given beside a trainer's configuration."""

from shim._configs.trainers import Trainer

TRAINER = Trainer(
    name="a model's own config",
    marks=("architectures",),
    settings={
        "moe": ("num_experts > 1", "n_routed_experts > 1", "num_local_experts > 1", "moe_intermediate_size > 0"),
        "mla": ("kv_lora_rank > 0",),
        "gdn": ("linear_num_value_heads > 0",),
        "gated-attention": ("attn_output_gate",),
        "dsa": ("index_topk > 0",),
        "mrope": ("rope_scaling.mrope_section", "rope_parameters.mrope_section"),
        "mamba": ("hybrid_override_pattern ~ M", "mamba_num_heads > 0"),
    },
    sizes_from="a trainer's configuration",
)
