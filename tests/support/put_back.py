"""Defects written back into releases that have fixed them: one line each, as an edit of the unparsed source."""

__all__ = ["DEFECTS"]

CORE, ENGINE = "megatron.core.", "transformer_engine."
MTP = CORE + "transformer.multi_token_prediction:"
ROUTER = CORE + "transformer.moe.router:TopKRouter."
SCHEDULES = CORE + "pipeline_parallel.schedules:"
OPTIMIZER = CORE + "optimizer.optimizer:"
DISTRIBUTED = CORE + "optimizer.distrib_optimizer:DistributedOptimizer."
FINALIZE = CORE + "distributed.finalize_model_grads:"
RECOMPUTE = CORE + "recompute:checkpointed_forward"
LAYERS = CORE + "tensor_parallel.layers:"
MLA_TENSORS = CORE + "transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"
YARN_FORWARD = CORE + "models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward"
FULLY_SHARD = CORE + "distributed.fsdp.src.megatron_fsdp.fully_shard:fully_shard_optimizer"
EXTENSIONS = CORE + "extensions.transformer_engine:"
ATTENTION = ENGINE + "pytorch.attention.dot_product_attention.dot_product_attention:DotProductAttention."
CROSS_ENTROPY = ENGINE + "common.triton.cross_entropy:"

UNEQUAL = "self.config.expert_tensor_parallel_size != self.config.tensor_model_parallel_size"
QUANTIZATION = ENGINE + "pytorch.quantization:FP8GlobalStateManager."
SKIP = "set_skip_fp8_weight_update_tensor"

# (patch, which of its signs, target, what stands there, what the defect has). The sign is tried on the newest release
# or commit that shows it.
DEFECTS = [
    (
        "mtp-packed-sequences",
        0,
        MTP + "_get_packed_roll_cu_seqlens",
        "packed_seq_params.cu_seqlens_q_padded if",
        "0 if",
    ),
    (
        "mtp-packed-sequences",
        0,
        MTP + "_roll_tensors_packed_seq",
        "_get_packed_roll_cu_seqlens(packed_seq_params)",
        "packed_seq_params.cu_seqlens_q",
    ),
    (
        "mtp-full-embeddings",
        0,
        MTP + "MultiTokenPredictionLayer._get_embeddings",
        "scatter_to_sequence_parallel_region(decoder_input, group=self.tp_group)",
        "decoder_input",
    ),
    (
        "sp-unscattered-embeddings",
        0,
        CORE + "models.gpt.gpt_model:GPTModel._preprocess",
        "tensor_parallel.scatter_to_sequence_parallel_region(decoder_input, group=self.pg_collection.tp)",
        "decoder_input",
    ),
    (
        "expert-main-params",
        0,
        OPTIMIZER + "ChainedOptimizer._split_state_dict",
        "state_dicts = [state_dict] * len(self.chained_optimizers)",
        "state_dicts[0] = state_dict",
    ),
    (
        "expert-main-params",
        0,
        OPTIMIZER + "ChainedOptimizer._split_state_dict",
        "for chunk_idx, model_chunk in enumerate(optimizer.model_chunks)",
        "for chunk_idx in range(len(optimizer.model_chunks))",
    ),
    (
        "te-mxfp8-empty-shard",
        0,
        ENGINE + "pytorch.tensor.utils:_cast_master_weights_to_fp8_mxfp8_scaling",
        "master_weight_dtype = params[0][0].dtype",
        "pass",
    ),
    (
        "te-skip-weight-update",
        0,
        QUANTIZATION + SKIP,
        f"def {SKIP}",
        "def _set",
    ),
    (
        "te-grouped-linear-graphs",
        0,
        ENGINE + "pytorch.module.grouped_linear:GroupedLinear.forward",
        "skip_fp8_weight_update = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor",
        "skip_fp8_weight_update = None",
    ),
    (
        "te-blockwise-partial-rows",
        0,
        ENGINE + "pytorch.distributed:_start_all_gather_fp8_blockwise",
        "inp = inp.dequantize(dtype=dtype)",
        "pass",
    ),
    (
        "rope-thd",
        0,
        CORE + "models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
        "freqs_packed = freqs[freq_pos]",
        "freqs_packed = torch.stack([freqs[at] for at in freq_pos])",
    ),
    (
        "expert-bias-padding",
        0,
        ROUTER + "_apply_expert_bias",
        "(~padding_mask).unsqueeze(-1)",
        "~padding_mask",
    ),
    ("expert-bias-padding", 1, ROUTER + "_apply_expert_bias", "(~flat_mask).unsqueeze(-1)", "~flat_mask"),
    ("masked-microbatch", 0, SCHEDULES + "forward_step_calc_loss", "torch.clamp(num_tokens, min=1)", "num_tokens"),
    (
        "reduce-non-contiguous",
        0,
        CORE + "tensor_parallel.mappings:_reduce",
        "input_ = input_.contiguous()",
        "whole = input_.contiguous()",
    ),
    ("lr-param-groups", 0, OPTIMIZER + "param_group_identifier_keys", "*_param_group_override_keys()", "'wd_mult'"),
    (
        "lr-param-groups",
        0,
        OPTIMIZER + "_param_group_override_keys",
        "tuple(sorted(_ParamGroupOverride.__annotations__.keys()))",
        "('wd_mult',)",
    ),
    ("lr-param-groups", 0, CORE + "optimizer_param_scheduler:ParamGroupOverride", "max_lr", "rate"),
    (
        "main-param-names",
        0,
        DISTRIBUTED + "_build_model_param_to_state_dict_param_map",
        "k.endswith(name)",
        "name in k",
    ),
    ("frozen-tied-embedding", 0, FINALIZE + "_allreduce_word_embedding_grads", "if grad is None", "if weight is None"),
    (
        "frozen-tied-embedding",
        1,
        FINALIZE + "_allreduce_embedding_grad",
        "if grad is None and skip_if_none",
        "if weight is None and skip_if_none",
    ),
    (
        "frozen-tied-embedding",
        1,
        FINALIZE + "_allreduce_word_embedding_grads",
        "partial(_get_shared_word_embedding_weight, config=config)",
        "partial(_get_shared_word_embedding_weight, config=config), False",
    ),
    (
        "mtp-gather-gradient",
        0,
        MTP + "MultiTokenPredictionLayer.forward",
        "gather_from_tensor_model_parallel_region(",
        "all_gather_last_dim_from_tensor_parallel_region(",
    ),
    (
        "mtp-gather-gradient",
        1,
        MTP + "MultiTokenPredictionLayer._concat_embeddings",
        "= gather_from_tensor_model_parallel_region(",
        "= all_gather_last_dim_from_tensor_parallel_region(",
    ),
    (
        "uniform-recompute-end",
        1,
        RECOMPUTE,
        "min(layer_idx + self.config.recompute_num_layers, self.num_layers_per_pipeline_rank)",
        "layer_idx + self.config.recompute_num_layers",
    ),
    (
        "recompute-padding-mask",
        0,
        RECOMPUTE,
        "hidden_states, context = cf(*args)",
        "hidden_states, context = cf(*args[:-1])",
    ),
    (
        "recompute-padding-mask",
        0,
        CORE + "transformer.transformer_block:TransformerBlock.forward",
        "padding_mask=padding_mask",
        "padding_mask=None",
    ),
    (
        "cp-comm-type-list",
        0,
        CORE + "transformer.transformer_layer:TransformerLayer.__init__",
        "config.cp_comm_type[self.layer_number - 1]",
        "config.cp_comm_type[self.layer_number]",
    ),
    (
        "pipeline-send-buffers",
        0,
        SCHEDULES + "forward_backward_pipelining_with_interleaving",
        "if send_next_wait_handle is not None and config.deallocate_pipeline_outputs",
        "if send_next_wait_handle is not None and config.batch_p2p_comm",
    ),
    (
        "p2p-default-group",
        0,
        CORE + "pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        "recv_next_shape_tensor, self.next_rank, self.pp_group)",
        "recv_next_shape_tensor, self.next_rank)",
    ),
    (
        "moe-without-te",
        0,
        CORE + "transformer.moe.moe_utils:te_general_gemm",
        "te_general_gemm = (None, ",
        "te_general_gemm = (_later, ",
    ),
    (
        "mla-without-te",
        0,
        CORE + "transformer.multi_latent_attention:HAVE_TE",
        "from megatron.core.extensions.transformer_engine import HAVE_TE",
        "HAVE_TE = True",
    ),
    (
        "reshardable-padding",
        0,
        DISTRIBUTED + "sharded_param_state_fully_reshardable",
        "adjusted_start = param_world_start - padding_adjustment",
        "adjusted_start = param_world_start",
    ),
    (
        "dp-reshardable-fp32",
        0,
        DISTRIBUTED + "_set_main_param_and_optimizer_states",
        "with torch.no_grad():",
        "with torch.enable_grad():",
    ),
    ("expert-grad-groups", 0, LAYERS + "ColumnParallelLinear.__init__", UNEQUAL, "False"),
    ("expert-grad-groups", 0, LAYERS + "RowParallelLinear.__init__", UNEQUAL, "False"),
    ("expert-grad-groups", 0, EXTENSIONS + "TELinear.__init__", UNEQUAL, "False"),
    ("expert-grad-groups", 0, EXTENSIONS + "TEGroupedLinear.__init__", UNEQUAL, "False"),
    ("expert-grad-groups", 0, EXTENSIONS + "_set_expert_parameter_attributes", "= not use_expert_pgs", "= True"),
    ("expert-grad-groups", 0, CORE + "post_training.modelopt.layers:Linear.__init__", UNEQUAL, "False"),
    (
        "fp32-residual",
        0,
        CORE + "fusions.fused_bias_dropout:_bias_dropout_add_func",
        "x = x.to(residual.dtype)",
        "residual = residual.to(x.dtype)",
    ),
    (
        "fp32-residual",
        0,
        CORE + "transformer.transformer_config:TransformerConfig.__post_init__",
        "self.pipeline_dtype = torch.float\n",
        "pass\n",
    ),
    (
        "moe-tracker-pipeline",
        0,
        CORE + "transformer.moe.moe_utils:track_moe_metrics",
        "torch.zeros(tracker_num_layers",
        "torch.zeros(num_layers",
    ),
    (
        "moe-tracker-pipeline",
        1,
        CORE + "transformer.moe.moe_logging:MoEMetricsTracker.report",
        "num_layers + (mtp_num_layers or 0)",
        "num_layers",
    ),
    ("te-cross-entropy", 0, CROSS_ENTROPY + "cross_entropy_backward_kernel", "grad * grad_output", "grad"),
    (
        "te-cross-entropy",
        0,
        CROSS_ENTROPY + "cross_entropy_tp_post_kernel",
        "x_sum += tl.load(rank_data_ptr + 3)",
        "x_sum += 0.0",
    ),
    ("seq-aux-loss-scale", 0, ROUTER + "_apply_seq_aux_loss", "local_num_tokens * bsz", "local_num_tokens"),
    *(
        (
            "sigmoid-aux-loss-precision",
            number,
            CORE + "transformer.moe.moe_utils:compute_routing_scores_for_aux_loss",
            f"torch.sigmoid({logits})",
            "torch.sigmoid(logits)",
        )
        for number, logits in enumerate(("logits.to(torch.float32)", "logits.float()"))
    ),
    (
        "dsa-indexer-loss-scale",
        0,
        SCHEDULES + "forward_step_calc_loss",
        "loss_scale_func(loss_scale * cp_size_for_scaling / num_microbatches)",
        "loss_scale_func(loss_scale * cp_size_for_scaling)",
    ),
    (
        "dsa-indexer-loss-scale",
        0,
        SCHEDULES + "_get_experimental_attention_variant_loss_scale_func",
        "return DSAIndexerLossAutoScaler.set_loss_scale",
        "return None",
    ),
    (
        "dsa-indexer-loss-scale",
        1,
        SCHEDULES + "forward_step_calc_loss",
        "DSAIndexerLossAutoScaler.set_loss_scale(loss_scale / num_microbatches)",
        "DSAIndexerLossAutoScaler.set_loss_scale(loss_scale)",
    ),
    (
        "mamba-norm-eps",
        0,
        CORE + "ssm.mamba_layer:MambaLayer.__init__",
        "hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon)",
        "hidden_size=self.config.hidden_size)",
    ),
    (
        "max-logit-graph",
        0,
        EXTENSIONS + "TEDotProductAttention.forward",
        "batch_max_attention_logits.detach()",
        "batch_max_attention_logits",
    ),
    (
        "max-logit-graph",
        0,
        CORE + "optimizer.qk_clip:clip_qk",
        "transformer_layer.self_attention.core_attention.current_max_attn_logits = None",
        "pass",
    ),
    (
        "gated-attention-few-groups",
        0,
        CORE + "transformer.attention:SelfAttention.get_query_key_value_tensors",
        "gate = gate[:, :, idx * size:(idx + 1) * size, :]",
        "pass",
    ),
    (
        "mla-fused-down-projection",
        0,
        CORE + "transformer.multi_latent_attention:FusedMLASelfAttention._qkv_down_projection",
        "[q_split, kv_split]",
        "[self.config.q_lora_rank, kv_split]",
    ),
    (
        "te-permutation",
        0,
        ENGINE + "common.triton.permutation:_compare_and_swap",
        "get_int_dtype(",
        "core.get_int_dtype(",
    ),
    ("te-softmax-offset", 0, ATTENTION + "__init__", "Parameter(torch.zeros(", "Parameter(torch.empty("),
    *(
        (
            "te-flash-3-cp",
            0,
            ENGINE + "pytorch.attention.dot_product_attention.context_parallel:" + function,
            "not use_flash_attn_3 and (not fa_utils.v2_7_0_plus)",
            "not fa_utils.v2_7_0_plus",
        )
        for function in (
            "cp_p2p_fwd_flash_attn",
            "AttnFuncWithCPAndKVAllGather.forward",
            "AttnFuncWithCPAndQKVOA2A.forward",
        )
    ),
    (
        "te-cp-thd-padding",
        0,
        ATTENTION + "forward",
        "cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None",
        "not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1])",
    ),
    (
        "checkpoint-write-format",
        0,
        CORE + "dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
        "tensor, write_item, storage_key, **extra_kwargs)",
        "tensor, write_item, storage_key)",
    ),
    (
        "sft-identity-prompts",
        0,
        CORE + "tokenizers.text.libraries.sft_tokenizer:SFTTokenizer.tokenize_conversation",
        "self._prompt_format == 'default'",
        "self._prompt_format in ['default', 'identity']",
    ),
    ("mla-packed-rope", 0, MLA_TENSORS, "packed_seq_params is None or", "inference_context is None or"),
    ("mla-packed-rope", 0, YARN_FORWARD, "and (not packed_seq)", ""),
    *(
        ("fsdp-optimizer-state", 0, FULLY_SHARD, was, "pass")
        for was in ("group['weight_decay'] = 0.0", "group.update(settings)", "state['step'] = 0", "group['step'] = 0")
    ),
]
