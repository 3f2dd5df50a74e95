"""Who is outside where patches of the shipped matrix share a target. A patch further down in the file is outside."""

from itertools import combinations

from shim._matrix.load import load_matrix

MODULE = "megatron.core.transformer.multi_token_prediction:"
MTP = MODULE + "MultiTokenPredictionLayer."
RANDOM = "megatron.core.tensor_parallel.random:"

# (inside, outside): the targets they share
OUTSIDE = {
    # mtp-packed-sequences is outside: it makes the loss mask of a row that has none, and tells the rolls the row. Up to
    # 0.15 its roll calls no other, and asks for what mtp-loss-cp has rolled.
    ("mtp-loss-cp", "mtp-packed-sequences"): {
        MODULE + "MultiTokenPredictionBlock.forward",
        MODULE + "process_mtp_loss",
        MODULE + "roll_tensor",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
    },
    # Outside, skip_loss leaves the loss out before anything is counted.
    ("mtp-loss-cp", "mtp-loss-options"): {
        MODULE + "MultiTokenPredictionBlock.forward",
        MODULE + "process_mtp_loss",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
    },
    # One gives the block or its layers another embedding, and the other handles what comes after: either order does.
    ("mtp-loss-cp", "mtp-full-embeddings"): {MODULE + "MultiTokenPredictionBlock.forward"},
    ("mtp-loss-options", "mtp-full-embeddings"): {MODULE + "MultiTokenPredictionBlock.forward"},
    ("mtp-packed-sequences", "mtp-full-embeddings"): {
        MODULE + "MultiTokenPredictionBlock.forward",
        MTP + "_get_embeddings",
    },
    # One gives the model embeddings instead of tokens, and the other handles what is behind them: either order does.
    ("mtp-packed-sequences", "sp-unscattered-embeddings"): {
        "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
        "megatron.core.models.mamba.mamba_model:MambaModel.forward",
    },
    ("mrope-thd", "sp-unscattered-embeddings"): {
        "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
    },
    ("fused-linear-logprob", "sp-unscattered-embeddings"): {
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
        "megatron.core.models.mamba.mamba_model:MambaModel.forward",
    },
    # One gives the model another output layer, and the other counts: either order does.
    ("mtp-loss-cp", "fused-linear-logprob"): {"megatron.core.models.gpt.gpt_model:GPTModel._postprocess"},
    # Outside, one takes promises before anything asks for their size, which would make the logits.
    ("gathered-logits-loss", "fused-linear-logprob"): {
        "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"
    },
    # Outside, one fills in steps before the other looks for the partner of each group: either order does.
    ("lr-param-groups", "fused-adam-step"): {
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict"
    },
    # One names the sharding, and the other makes states before they are asked for: either order does.
    ("optimizer-sharding-default", "cpu-offloaded-optimizer"): {
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict"
    },
    # One leaves out the step of each entry, which the other does not copy into its own: either order does.
    ("cpu-offloaded-optimizer", "dp-reshardable-empty-bucket"): {
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_reshardable"
    },
    # The checkpoint runs its function again, so what packed rows need has to be in there. _checkpointed_forward of
    # mtp-recompute does the whole job itself, and calls that of mtp-packed-sequences no more.
    ("mtp-packed-sequences", "mtp-recompute"): {MTP + "forward", MTP + "_checkpointed_forward"},
    # One gives other arguments or returns the main states before the loss, and the other rolls: either order does.
    ("mtp-packed-sequences", "mtp-loss-options"): {
        MODULE + "MultiTokenPredictionBlock.forward",
        MODULE + "process_mtp_loss",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
    },
    # Outside, one sums more weights by a second call, which has no attention to look for: either order does.
    ("mla-query-norm-gradient", "gated-delta-net-norm"): {
        "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
    },
    # config-override only marks the function and calls it: either order does.
    ("fp8-fp4-recompute", "config-override"): {
        RANDOM + "CheckpointFunction.forward",
        RANDOM + "CheckpointWithoutOutput.checkpoint",
    },
    # One leaves the checkpoint out without gradients, and the other gives it other arguments: either order does.
    ("fp8-fp4-recompute", "checkpoint-non-tensors"): {RANDOM + "checkpoint"},
    # Each puts something around the function that a checkpoint runs: either order does.
    ("fp8-fp4-recompute", "router-replay"): {RANDOM + "CheckpointFunction.forward"},
    ("config-override", "router-replay"): {RANDOM + "CheckpointFunction.forward"},
    # The input has to require a gradient before a checkpoint takes it: either order does.
    ("fp8-fp4-recompute", "frozen-recompute"): {
        "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward"
    },
    # One sees to the states and the other to the layers: either order does.
    ("frozen-recompute", "recompute-padding-mask"): {
        "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward"
    },
    # One looks at the outputs of the recomputed function and the other at its inputs: either order does.
    ("checkpoint-without-grad", "recompute-frees-inputs"): {RANDOM + "CheckpointFunction.backward"},
    # One gives back a function of Transformer Engine, and the other a None where there is none: either order does.
    ("te-moved-symbols", "moe-without-te"): {"megatron.core.transformer.moe.moe_utils:te_general_gemm"},
    # Both take the function's place with the same function: either order does.
    ("te-cross-entropy", "te-cross-entropy-copy"): {"transformer_engine.pytorch.cross_entropy:parallel_cross_entropy"},
    # Both take the function's place, and chunked-logprob smooths labels as label-smoothing does: either order does.
    ("label-smoothing", "chunked-logprob"): {
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
    },
    # p2p-default-group takes the function's place, and sends by _batched_p2p_ops, which has the order already. Outside,
    # pipeline-p2p-order would exchange what is sent twice.
    ("pipeline-p2p-order", "p2p-default-group"): {
        "megatron.core.pipeline_parallel.p2p_communication:_communicate_shapes",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
    },
    # loss-token-count is outside: a rank's count of zero may become one only after the counts of ranks are summed.
    ("masked-microbatch", "loss-token-count"): {
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    },
    # One looks at what the loss function returns and the other at the scale of other losses: either order does.
    ("moe-aux-loss-scale", "loss-token-count"): {
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    },
    ("dsa-indexer-loss-scale", "loss-token-count"): {
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    },
    ("masked-microbatch", "moe-aux-loss-scale"): {
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    },
    # One replaces the tokens of a rank in the result, and the other reads those of all: either order does.
    ("moe-aux-loss-scale", "z-loss-padding"): {
        "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"
    },
    # Each sets the scale of losses of its own before the function's backward: either order does.
    ("moe-aux-loss-scale", "dsa-indexer-loss-scale"): {
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    },
    # One sets the dtype of messages, and the other remembers the config: either order does.
    ("fp32-residual", "interleaved-shapes"): {
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving"
    },
    # One gives the forward another group or dimension, and the other another view of the embedding: either order does.
    ("mrope-thd", "mrope-rotary-interleaved"): {
        "megatron.core.models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding.forward"
    },
    # Multi-latent attention has no multimodal positions, so a call concerns one of them at most.
    ("mrope-thd", "mla-rope-key-gradient"): {
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
    },
    # expert-grad-groups marks before it calls on, and expert-bias-gradient looks at that after the call: either does.
    ("expert-grad-groups", "expert-bias-gradient"): {
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"
    },
    # Both take the function's place, and only that of rope-fusion tells from its values which rows a table has.
    ("rope-thd", "rope-fusion"): {"megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"},
    # mrope-thd is outside: the packed row that it hands on as an unpacked one with its own table may stay fused.
    ("rope-fusion", "mrope-thd"): {"megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"},
    # One replaces the config of the call and the other the tensor: either order does.
    ("rope-fusion", "mla-rope-key-gradient"): {
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"
    },
    # One gives the model another output layer, which the others call as they call the model's own: either order does
    # for the first and the last. mtp-loss-options wraps the output layer in a function, which has to be inside.
    ("mtp-packed-sequences", "fused-linear-logprob"): {
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
        "megatron.core.models.mamba.mamba_model:MambaModel.forward",
    },
    ("mtp-loss-options", "fused-linear-logprob"): {"megatron.core.models.gpt.gpt_model:GPTModel._postprocess"},
    ("mrope-thd", "fused-linear-logprob"): {"megatron.core.models.gpt.gpt_model:GPTModel.forward"},
    # Outside, mla-packed-rope gives the others a table with a row for each position. Of the other target, one gives the
    # attention another table and the other a key: either order does.
    ("rope-fusion", "mla-packed-rope"): {"megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"},
    ("mrope-thd", "mla-packed-rope"): {"megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"},
    ("mla-rope-key-gradient", "mla-packed-rope"): {
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
    },
    # One copies the turns of the conversation, and the other those of tools alone: either order does.
    ("multimodal-conversation", "multimodal-tool-turns"): {
        "megatron.core.tokenizers.vision.libraries.multimodal_tokenizer:MegatronMultimodalTokenizer.tokenize_conversation"
    },
    # Each gives parameters attributes of its own before the optimizer is made: either order does.
    ("tp-attributes", "muon-qkv-shapes"): {"megatron.core.optimizer.muon:get_megatron_muon_optimizer"},
}


def test_every_pair_that_shares_a_target_is_known_with_its_order():
    """On some supported release; whoever adds a pair, or moves a patch in the file, has to say who is outside."""
    matrix = load_matrix()
    found = {}
    for distribution, releases in matrix.supported.items():
        for release in releases:
            on = {}
            for id, entry in matrix.patches.items():
                pin = matrix.pins[distribution][release].get(id)
                if pin is not None and pin.variant is not None:
                    for target in entry.variants[pin.variant].targets:
                        on.setdefault(target, []).append(id)
            for target, ids in on.items():
                for pair in combinations(ids, 2):
                    found.setdefault(pair, set()).add(target)
    assert found == OUTSIDE
