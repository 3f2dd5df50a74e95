"""A small real GPTModel with MTP that has the same global weights on every release and layout."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from .attention import CPUCoreAttention

__all__ = ["ON_CPU", "add_lora", "build_chunks", "build_gpt", "build_hybrid", "release"]

# For the config of any layer: weights on the CPU, and no fused kernel, which need a GPU, Apex or Transformer Engine.
ON_CPU: dict[str, Any] = {
    "params_dtype": torch.float32,
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}

_SMALL_CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "add_bias_linear": False,
    "pipeline_dtype": torch.float32,
    "hidden_dropout": 0.0,
    "mtp_loss_scaling_factor": 0.1,
    **ON_CPU,
}

_ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def release() -> str:
    """The version of the imported megatron-core, such as "0.16.1"."""
    import megatron.core

    return megatron.core.__version__


def build_gpt(
    *,
    mtp_num_layers: int | None = 1,
    position_embedding_type: str = "rope",
    vocab_size: int = 64,
    max_sequence_length: int = 128,
    seed: int = 7,
    share_embeddings_and_output_weights: bool = True,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> nn.Module:
    """A GPTModel of the installed release on CPU, in training mode, for the initialised layout.

    Attention is `CPUCoreAttention`, so packed rows work. Weights depend only on `seed` and on the parameter's name
    and global shape: every release and every tensor- or pipeline-parallel size has (shards of) the same model.
    `pre_process` and `post_process` default to this pipeline stage. `vp_stage` selects the virtual stage of the rank
    (see `build_chunks`). `model_kwargs` go to GPTModel, `config_overrides` to TransformerConfig (by default 2 layers,
    hidden size 32, 4 heads in 2 groups, float32).
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = _config(mtp_num_layers=mtp_num_layers, **config_overrides)
    first, last = _stage(vp_stage)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    spec.submodules.self_attention.submodules.core_attention = CPUCoreAttention
    mtp_spec = None
    if mtp_num_layers:
        make_spec = gpt_layer_specs.get_gpt_mtp_block_spec
        mtp_spec = make_spec(config, spec, use_transformer_engine=False, **_known(make_spec, vp_stage=vp_stage))
    with inference_layers_are_classes():
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=first if pre_process is None else pre_process,
            post_process=last if post_process is None else post_process,
            position_embedding_type=position_embedding_type,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            parallel_output=True,
            mtp_block_spec=mtp_spec,
            **_known(GPTModel, vp_stage=vp_stage),
            **(model_kwargs or {}),
        )
    _seed_weights(model, seed, share_embeddings_and_output_weights)
    run_mtp_on_labels(model)
    return model.train()


def build_chunks(build: Callable[..., nn.Module] = build_gpt, **options: Any) -> list[nn.Module]:
    """The models of this rank under a `Layout` with virtual stages: one per stage, in order.

    `build` and its `options` build one stage. Layouts without virtual stages also work.
    """
    from megatron.core import parallel_state

    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return [build(vp_stage=stage, **options) for stage in range(stages)] if stages else [build(**options)]


def build_hybrid(
    pattern: str = "*-*-/*-",
    *,
    position_embedding_type: str = "rope",
    vocab_size: int = 64,
    max_sequence_length: int = 128,
    seed: int = 7,
    share_embeddings_and_output_weights: bool = True,
    mixer: type[nn.Module] | None = None,
    **config_overrides: Any,
) -> nn.Module:
    """The hybrid model (MambaModel up to 0.17, HybridModel from 0.18), as `build_gpt` builds a GPTModel.

    pattern: attention (*), MLP (-) and expert (E) layers, and Mamba layers (M) with a `mixer`. Every part after a "/"
    is one MTP depth, and all depths are equal. Upstream's specs need Transformer Engine. So the specs here use the
    local layers, and the norm that the stack takes from Transformer Engine is replaced during the build.
    mixer: stands in for MambaMixer, whose kernels need a GPU. It is built with what a MambaLayer gives its mixer.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    if find_spec("megatron.core.models.hybrid") is None:
        block, models = "megatron.core.ssm.mamba_block", "megatron.core.models.mamba.mamba_model"
        name = "Mamba"
    else:
        block, models = "megatron.core.models.hybrid.hybrid_block", "megatron.core.models.hybrid.hybrid_model"
        name = "Hybrid"
    blocks: Any = import_module(block)
    model_class = getattr(import_module(models), f"{name}Model")
    mlp_layer = import_module("megatron.core.ssm.mlp_layer").MLPLayer

    main, *depths = pattern.split("/")
    overrides = {"num_layers": len(main.replace("|", "")), "is_hybrid_model": True, **config_overrides}
    config = _config(mtp_num_layers=len(depths) or None, **overrides)
    whole = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    whole.self_attention.submodules.core_attention = CPUCoreAttention
    norm = whole.input_layernorm
    attention_parts = {name: getattr(whole, name) for name in ("input_layernorm", "self_attention", "self_attn_bda")}
    mlp_parts = {name: getattr(whole, name) for name in ("pre_mlp_layernorm", "mlp", "mlp_bda")}
    moe_layer = None
    if config.num_moe_experts:
        experts = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts).submodules
        parts = {name: getattr(experts, name) for name in mlp_parts}
        moe_layer = ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))
    mtp_spec = None
    if depths:
        layer = mtp.get_mtp_layer_spec(ModuleSpec(TransformerLayer, submodules=whole), use_transformer_engine=False)
        layer.submodules.mtp_model_layer = None  # built from the pattern
        mtp_spec = ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
        )
    submodules_class = getattr(blocks, f"{name}StackSubmodules")
    later = "hybrid_layer_pattern"
    pattern_name = later if later in inspect.signature(model_class).parameters else "hybrid_override_pattern"
    stack = ModuleSpec(
        module=getattr(blocks, f"{name}Stack"),
        submodules=submodules_class(
            attention_layer=ModuleSpec(
                module=TransformerLayer, submodules=TransformerLayerSubmodules(**attention_parts)
            ),
            mlp_layer=ModuleSpec(module=mlp_layer, submodules=TransformerLayerSubmodules(**mlp_parts)),
            **({} if mixer is None else {"mamba_layer": _mamba_layer(mixer, norm, whole.self_attn_bda)}),
            **_known(submodules_class, mtp_block_spec=mtp_spec),
            **({"moe_layer": moe_layer} if moe_layer else {}),
        ),
    )
    first, last = _stage(None)
    te_norm = blocks.TENorm
    blocks.TENorm = norm
    try:
        with inference_layers_are_classes():
            model = model_class(
                config,
                stack,
                vocab_size=vocab_size,
                max_sequence_length=max_sequence_length,
                **{pattern_name: pattern},
                pre_process=first,
                post_process=last,
                position_embedding_type=position_embedding_type,
                share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            )
    finally:
        blocks.TENorm = te_norm
    _seed_weights(model, seed, share_embeddings_and_output_weights)
    run_mtp_on_labels(model)
    return model.train()


def _mamba_layer(mixer: type[nn.Module], norm: Any, bda: Any) -> Any:
    """The spec of a Mamba layer of local modules."""
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=bda)
    return ModuleSpec(module=MambaLayer, submodules=parts)


def run_mtp_on_labels(model: Any) -> None:
    """Let a model whose multi-token prediction asks for labels of its own have them if it is trained.

    A fork for reinforcement learning is called as its trainers do (see `_TrainersCall`). A hybrid model may get labels
    as `mtp_labels`.
    """
    if not model.config.mtp_num_layers:
        return
    if "mtp_kwargs" in _parameters(model):
        call = _TrainersCall()
        model.register_forward_pre_hook(call.give, with_kwargs=True)
        model.register_forward_hook(call.take)
    elif "mtp_labels" in _parameters(model):
        model.register_forward_pre_hook(_with_mtp_labels, with_kwargs=True)


def mtp_shift(model: Any) -> int:
    """By how many tokens the first layer of multi-token prediction moves its labels and the loss mask.

    By one, because labels are moved already. A model that gets tokens in place of labels moves both once more.
    """
    return 2 if "mtp_kwargs" in _parameters(model) else 1


def _parameters(model: Any) -> Set[str]:
    return inspect.signature(type(model).forward).parameters.keys()


def _with_mtp_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    if kwargs.get("labels") is None or "mtp_labels" in kwargs:
        return None
    return args, {**kwargs, "mtp_labels": kwargs["labels"]}


class _TrainersCall:
    """Hooks for a model that slime and miles train: they call it without labels, and compute the main loss themselves.

    Multi-token prediction is trained only if the call has `mtp_kwargs={"mtp_labels": ...}`, the tokens of the row (see
    `mtp_shift`). A caller of a model with these hooks gives labels and gets losses, as of any other model.
    """

    def __init__(self) -> None:
        self.labels: Tensor | None = None

    def give(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self.labels = None if "mtp_kwargs" in kwargs else kwargs.get("labels")
        if self.labels is None:
            return None
        tokens = args[0] if args else kwargs["input_ids"]
        return args, {**kwargs, "labels": None, "mtp_kwargs": {"mtp_labels": tokens}}

    def take(self, model: Any, args: tuple[Any, ...], output: Any) -> Tensor | None:
        labels, self.labels = self.labels, None
        if labels is None or not model.post_process:
            return None
        loss: Tensor = model.compute_language_model_loss(labels, output.transpose(0, 1).contiguous())
        return loss


@contextlib.contextmanager
def inference_layers_are_classes() -> Iterator[None]:
    """Lets stock 0.20 build layers of multi-token prediction without Transformer Engine (see patch mtp-without-te).

    Layers for inference, of which stock asks isinstance(), are mocks there. Stands classes without instances in for
    them, so that tests can compare stock with patches.
    """
    layers = sys.modules.get("megatron.core.tensor_parallel.inference_layers")
    mocks = {
        name: value
        for name, value in vars(layers or object).items()
        if name.startswith("Inference") and name.endswith("ParallelLinear") and not isinstance(value, type)
    }
    for name in mocks:
        setattr(layers, name, type(name, (), {}))
    try:
        yield
    finally:
        for name, mock in mocks.items():
            setattr(layers, name, mock)


def _config(**overrides: Any) -> Any:
    """A TransformerConfig for the initialised layout, or that of multi-latent attention."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    layout = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    config = MLATransformerConfig if overrides.get("multi_latent_attention") else TransformerConfig
    return config(**{**_SMALL_CONFIG, **layout, **overrides})


def _stage(vp_stage: int | None) -> tuple[bool, bool]:
    """Whether this (virtual) stage is the first, and whether it is the last."""
    from megatron.core import parallel_state

    is_first, is_last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    if vp_stage is not None:  # up to 0.12 every module reads it from there
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    which = _known(is_first, vp_stage=vp_stage)
    return is_first(ignore_virtual=vp_stage is None, **which), is_last(ignore_virtual=vp_stage is None, **which)


def _known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that are not None and that the function of this release takes."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if value is not None and name in taken}


def _seed_weights(model: Any, seed: int, shared_output: bool) -> None:
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    of_experts = (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    for name, weight in _global_names(model, shared_output):
        size, rank = of_experts if ".experts." in name else tp
        _seed_weight(weight, name, seed, size, rank, stacked=_stacked(name, model.config))


def _global_names(model: Any, shared_output: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter with a name independent of the release, the pipeline stage and the expert's rank."""
    from megatron.core import parallel_state

    experts = (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first = experts * parallel_state.get_expert_model_parallel_rank()
    for name, weight in model.named_parameters():
        name = re.sub(r"(?<=\.local_experts\.)\d+", lambda local: str(int(local[0]) + first), name)
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # renamed in 0.17
        if name.startswith("decoder.layers."):
            local, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
        if shared_output and name == "output_layer.weight":  # the last stage's copy of the embedding
            name = "embedding.word_embeddings.weight"
        yield name, weight


def _stacked(name: str, config: Any) -> int:
    """How many matrices a weight stacks: a gated linear_fc1 stacks gate and up, and a rank has a part of each."""
    return 2 if config.gated_linear_unit and "linear_fc1" in name else 1


@torch.no_grad()
def _seed_weight(
    weight: Tensor, name: str, seed: int, tp_size: int, tp_rank: int, stacked: int = 1, scale: float = 0.2
) -> None:
    """Fill this rank's shard of the global weight `name`; weights of norms stay around 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    dim = getattr(weight, "partition_dim", -1)
    sharded = tp_size > 1 and getattr(weight, "tensor_model_parallel", False) and dim >= 0
    shape = list(weight.shape)
    if sharded:
        shape[dim] *= tp_size
    full = torch.randn(shape, generator=generator) * scale
    if weight.dim() == 1 and name.endswith("weight"):
        full = 1.0 + full
    if sharded:
        full = torch.cat([part.chunk(tp_size, dim)[tp_rank] for part in full.chunk(stacked, dim)], dim)
    weight.copy_(full)


class _Adapter(nn.Module):
    """Low-rank update of a column- or row-parallel linear layer, sharded as the layer is.

    The weight `down` of a column-parallel layer and the weight `up` of a row-parallel layer are replicated. The other
    weights are sharded. Under sequence parallelism a replicated weight sees only this rank's tokens. A layer of an
    expert, which no other rank has a part of, gets its tokens from a dispatcher, so that its adapter sends nothing.
    """

    def __init__(self, linear: Any, rank: int, column: bool) -> None:
        super().__init__()
        out_features, in_features = linear.weight.shape
        self.column = column
        self.of_expert = getattr(linear, "is_expert", False)
        self.sequence_parallel = linear.config.sequence_parallel and not self.of_expert
        self.down = nn.Parameter(linear.weight.new_empty(rank, in_features))
        self.up = nn.Parameter(linear.weight.new_empty(out_features, rank))
        if self.of_expert:
            for weight in (self.down, self.up):
                weight.allreduce = getattr(linear.weight, "allreduce", True)  # type: ignore[attr-defined]
            return
        sharded: Any = self.up if column else self.down
        replicated: Any = self.down if column else self.up
        sharded.tensor_model_parallel = True
        sharded.partition_dim = 0 if column else 1
        replicated.tensor_model_parallel = False
        replicated.sequence_parallel = self.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, in], as the layer's input -> [s, b, out], as the layer's output."""
        from megatron.core.tensor_parallel import mappings

        low = nn.functional.linear(hidden, self.down).contiguous()
        if self.of_expert:
            return nn.functional.linear(low, self.up)
        if self.column:
            enter = mappings.copy_to_tensor_model_parallel_region
            if self.sequence_parallel:
                enter = mappings.gather_from_sequence_parallel_region
            low = enter(low)
        else:
            leave = mappings.reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                leave = mappings.reduce_scatter_to_sequence_parallel_region
            low = leave(low)
        return nn.functional.linear(low, self.up)


def _add_update(linear: Any, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Forward hook of an adapted layer."""
    return output[0] + linear.lora(args[0]), output[1]


def add_lora(model: nn.Module, rank: int = 4, seed: int = 11) -> list[nn.Parameter]:
    """Freeze every weight of a `build_gpt` model and add trainable low-rank adapters; returns their weights.

    The adapters go to the attention and MLP projections of decoder and MTP layers. Existing names do not change (an
    adapter is the submodule `lora` of its layer). Both factors start non-zero, so that every factor gets a gradient.
    Experts get adapters too, unless tensor parallelism cuts them (ValueError).
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear

    for weight in model.parameters():
        weight.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if name.rpartition(".")[2] in _ADAPTED:
            if getattr(linear, "is_expert", False) and parallel_state.get_expert_tensor_parallel_world_size() > 1:
                raise ValueError(f"{name} has a part of an expert, which add_lora cannot adapt: use etp=1")
            linear.lora = _Adapter(linear, rank, isinstance(linear, ColumnParallelLinear))
            linear.register_forward_hook(_add_update)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    adapters = []
    for name, weight in _global_names(model, shared_output=True):
        if ".lora." in name:
            stacked = _stacked(name, model.config)
            _seed_weight(weight, name, seed, tp_size, tp_rank, stacked=stacked, scale=0.1)
            adapters.append(weight)
    return adapters
