"""mcore-bridge's own model classes on CPU: built by its loader, and measured against the truth.

Core attention is shim.testing's, because there is none of Transformer Engine's without a GPU.
"""

import contextlib

import torch
from te_on_cpu import routers_on_cpu, te_modules_built, te_modules_on_cpu

from shim import testing

# Where the padding of a row lies: nowhere, or after every sequence, where cu_seqlens_*_padded says so.
ROWS = {"plain": 1, "padded": 8}
RECOMPUTE = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "uniform by two": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
}
_SMALL = {
    "hf_model_type": "qwen3",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "padded_vocab_size": 64,
    "max_position_embeddings": 128,
    "params_dtype": torch.float32,
    "use_cpu_initialization": True,
    "perform_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
MOE = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
}

# Other models of its own classes than the dense one, by what they are built with.
KINDS = {
    "experts": {
        "mtp_num_layers": 1,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
    },
    "latent attention": {
        "hf_model_type": "deepseek_v3",
        "multi_latent_attention": True,
        "mtp_num_layers": 1,
        "num_query_groups": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "add_qkv_bias": False,
    },
    "mrope": {"mtp_num_layers": None, "position_embedding_type": "mrope", "mrope_section": [2, 1, 1]},
    "tied, detached": {
        "mtp_num_layers": 2,
        "mtp_decoder_input_detach": True,
        "untie_embeddings_and_output_weights": False,
    },
}


@contextlib.contextmanager
def on_cpu(layout=None):
    """Inside, this process can build and train models."""
    with (
        testing.megatron_on_cpu(),
        testing.te_cuda_stand_ins(),
        te_modules_on_cpu(),
        testing.layout_initialised(layout or testing.Layout()),
    ):
        yield


def _loader(loader):
    class OnCpu(loader):
        """The model's own loader, except for the core attention."""

        def get_transformer_layer_spec(self, vp_stage=None):
            spec = super().get_transformer_layer_spec(vp_stage=vp_stage)
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = testing.CPUCoreAttention
            return spec

    return OnCpu


def build(seed=7, float_masks=True, **options):
    """A model of get_mcore_model, in training mode, with weights that are nowhere 0 or 1.

    float_masks: it takes loss masks of floats too.
    """
    from mcore_bridge import ModelConfig, get_mcore_model
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = ModelConfig(**{**_SMALL, **options})
    config.model_meta.loader = _loader(config.model_meta.loader)
    try:
        with te_modules_built():
            [model] = get_mcore_model(config)
    finally:
        config.model_meta.loader = config.model_meta.loader.__base__
    _stir(model.parameters(), seed)
    if float_masks:
        model.register_forward_pre_hook(_whole_mask, with_kwargs=True)
    return model.train()


def _stir(weights, seed):
    """Move every weight a little. LoRA's own start has a factor of zeros, whose partner would get no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights:
            weight += 0.1 * torch.randn(weight.shape, generator=generator)


def _whole_mask(module, args, kwargs):
    """ms-swift's loss masks are boolean, and mcore-bridge's loss takes no other."""
    if kwargs.get("loss_mask") is not None:
        kwargs["loss_mask"] = kwargs["loss_mask"].bool()
    return args, kwargs


LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")  # every linear layer of attention and MLP


def with_lora(model, seed=11, names=LINEAR):
    """The same model with its own LoRA layers in the linear layers of these names, and all else frozen.

    peft puts them in place, as ms-swift has it do; both factors are set, so that both get a gradient.
    """
    from peft import LoraConfig, get_peft_model

    with te_modules_built():
        get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(names)))
    _stir([weight for weight in model.parameters() if weight.requires_grad], seed)
    return model.train()


def row_of(align, lengths=(5, 7, 4)):
    return testing.pack(testing.random_sequences(lengths), align=align)


def error(model, align, **options):
    """The largest difference between a packed row and its sequences alone, relative."""
    row = row_of(align)
    with routers_on_cpu():
        packed, alone = testing.run_packed(model, row, **options), testing.run_alone(model, row, **options)
    assert alone.grads, "nothing was trained"
    return testing.worst(testing.differences(packed, alone))


def configs(model):
    """Every config of any module, each once: some are copies of others."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextlib.contextmanager
def setting(model, **options):
    with contextlib.ExitStack() as undo:
        for config in configs(model):
            for name, value in options.items():
                undo.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        yield


def attention_calls(model, run):
    """(what run() returns, how often a core attention ran in it): a recomputed layer runs its own twice."""
    calls = []
    cores = [module for module in model.modules() if isinstance(module, testing.CPUCoreAttention)]
    handles = [core.register_forward_pre_hook(lambda *_: calls.append(1)) for core in cores]
    try:
        return run(), len(calls)
    finally:
        for handle in handles:
            handle.remove()


def counted_tokens(padding, tokens=4):
    """Tokens per expert that the router counts for its bias, for a row of `tokens` tokens that ends in padding."""
    model = build(**MOE)
    [router] = [module for module in model.modules() if hasattr(module, "local_tokens_per_expert")]
    ids = torch.arange(tokens + padding)[None]
    real = (ids < tokens)[:, None, None]
    # mcore-bridge takes the padding mask from an attention mask that is True where nothing may be attended to.
    mask = ~(real & real.transpose(2, 3)) if padding else None
    with routers_on_cpu():
        model(ids, ids, mask, labels=ids).mean().backward()
    return router.local_tokens_per_expert.tolist()
