"""Small models of Transformer Engine's layers in BF16, also for `shim prove --device cuda --model te_models:dense`."""

SIZES = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
FP8 = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
# Values are narrower than keys, as in the models that have it.
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "rope",
}


def dense(**overrides):
    return _model(num_query_groups=2, **overrides)


def multi_token(**overrides):
    return _model(num_query_groups=2, mtp_num_layers=2, **overrides)


def experts(**overrides):
    return _model(num_query_groups=2, **EXPERTS, **overrides)


def latent(**overrides):
    return _model(**LATENT, **overrides)


def dense_fp8(**overrides):
    return dense(**{**FP8, **overrides})


def multi_token_fp8(**overrides):
    return multi_token(**{**FP8, **overrides})


def experts_fp8(**overrides):
    """Each expert's rows are padded to what quantized products take."""
    return experts(**{**FP8, "moe_router_padding_for_fp8": True, **overrides})


def latent_fp8(**overrides):
    return latent(**{**FP8, **overrides})


def _model(**options):
    """A GPTModel. Nothing of megatron-core is imported before it is called."""
    import torch
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    is_latent = "kv_lora_rank" in options
    make = MLATransformerConfig if is_latent else TransformerConfig
    config = make(**SIZES, params_dtype=torch.bfloat16, **options)
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        multi_latent_attention=is_latent,
    )
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=128,
        max_sequence_length=512,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )
