"""Which parameters tensor parallelism cuts, so that the gradient norm counts each of them once.

What is wrong: the norm that gradients are clipped by counts a parameter on every tensor-parallel rank if it is marked
tensor_model_parallel, and on rank 0 alone if it is not. Some parameters have the wrong mark, in silence:
- With perform_initialization=False, as mcore-bridge and ms-swift build models, megatron-core's own embeddings and
  linear layers lose it (0.12 to 0.17). The norm is that of rank 0: 3.0 for 4.5.
- Grouped experts of Transformer Engine lose it from Transformer Engine 2.13 on (up to 0.18).
- Transformer Engine marks `duplicated` linear layers, such as LoRA's (up to 0.16). They count once for each rank.
- Attention sinks (softmax_type="learnable") have none (from 0.15 on).
- Mamba's gated norm, which each rank has for its own channels, has none (up to 0.15).
- Experts that no other rank holds have none if they are biases, or LoRA layers of a trainer (up to 0.18).
And one has the wrong dimension: the weights of row-parallel experts of Transformer Engine that are cut are said to be
cut along dimension 0, in place of 1 (up to 0.18; grouped ones with Transformer Engine before 2.13). Muon and resharding
read it. slime, miles and AReaL each correct it.

What the patch does: before get_megatron_optimizer makes its copies of parameters, it goes over them once, and gives
those of upstream's classes the attributes that their constructors should have set. So it also fixes models that were
built before apply(). The muon optimizer of 0.16 and 0.17 has another function, which gets the same pass.

What it leaves alone: attributes that are set, but for the defaults (False, -1, 1) that trainers fill in, for the mark
of `duplicated` layers, and for that dimension; layers that a subclass has given weights of another size; models of
Megatron-FSDP, which takes the attributes earlier. Experts whose tensor parallelism is 1 without expert parallelism keep
theirs: their gradients are not summed over tensor-parallel ranks, so no norm is right. If the tensor parallelism of
experts is neither 1 nor that of other layers, the biases of row-parallel experts are counted as on stock. Attributes
stay on the parameters after shim.revert(), and an optimizer made before apply() keeps its own.

Upstream: pull requests 4084 (initialisation, in 0.18), 3213 (duplicated, in 0.17), 5916 (experts, in 0.19), 2202
(Mamba, in 0.16), 7530 (sinks, open).

Delete when: a release marks attention sinks, and those before it are not supported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

GET_MEGATRON_OPTIMIZER = "megatron.core.optimizer:get_megatron_optimizer"
GET_MEGATRON_MUON_OPTIMIZER = "megatron.core.optimizer.muon:get_megatron_muon_optimizer"

LAYERS = "megatron.core.tensor_parallel.layers"
EXPERTS = "megatron.core.transformer.moe.experts"
ATTENTION = "megatron.core.transformer.dot_product_attention"
EXTENSIONS = "megatron.core.extensions.transformer_engine"
MAMBA = "megatron.core.ssm.mamba_mixer"

# What is cut: the parameters of a class, each with its dimension. Experts' have a number behind their names.
SINKS = {
    (ATTENTION, "DotProductAttention"): {"softmax_offset": 0},
    (EXTENSIONS, "TEDotProductAttention"): {"softmax_offset": 0},
}
CUT = {
    (LAYERS, "VocabParallelEmbedding"): {"weight": 0},
    (LAYERS, "ColumnParallelLinear"): {"weight": 0},
    (LAYERS, "RowParallelLinear"): {"weight": 1},
    (EXPERTS, "GroupedMLP"): {"weight1": 1, "weight2": 0},
    (MAMBA, "ExtendedRMSNorm"): {"weight": 0},
    # Transformer Engine marks weights, but no biases where megatron-core cuts them for it: those of experts.
    (EXTENSIONS, "TEColumnParallelLinear"): {"bias": 0},
    (EXTENSIONS, "TEColumnParallelGroupedLinear"): {"weight": 0, "bias": 0},
    (EXTENSIONS, "TERowParallelGroupedLinear"): {"weight": 1},
    **SINKS,
}
# Transformer Engine is told of no parallel mode for experts that are cut, and takes all for column-parallel.
ROW = ((EXTENSIONS, "TERowParallelLinear"), (EXTENSIONS, "TERowParallelGroupedLinear"))
GROUPS = ("pg_collection", "model_comm_pgs")  # the caller's own process groups, since 0.15 and in 0.14
GROUPED = (EXTENSIONS, "TEGroupedLinear")
# Where a layer keeps the size that its weight has on one rank along the dimension that is cut.
SIZES = ("num_embeddings_per_partition", "output_size_per_partition", "input_size_per_partition")


def _with_attributes(original: Function, *, sinks_alone: bool) -> Function:
    chunks_of = argument(original, "model_chunks")
    known = [name for name in GROUPS if name in inspect.signature(original).parameters]
    groups_of = argument(original, known[0]) if known else lambda args, kwargs: None

    @functools.wraps(original)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        experts_whole = not sinks_alone and _are_experts_whole(groups_of(args, kwargs))
        for chunk in chunks_of(args, kwargs):
            if not _is_fsdp(chunk):
                _set_attributes(chunk, sinks_alone, experts_whole)
        return original(*args, **kwargs)

    return get_megatron_optimizer


def _is_fsdp(chunk: Any) -> bool:
    settings = getattr(chunk, "ddp_config", None)
    return any(getattr(settings, name, False) for name in ("use_megatron_fsdp", "use_custom_fsdp"))


def _are_experts_whole(groups: Any) -> bool:
    """Whether the tensor parallelism of experts is 1. groups: the caller's own process groups, or None."""
    if groups is None:
        return sys.modules["megatron.core.parallel_state"].get_expert_tensor_parallel_world_size() == 1
    group = getattr(groups, "expt_tp", None)
    return group is not None and group.size() == 1


def _set_attributes(chunk: Any, sinks_alone: bool, experts_whole: bool) -> None:
    cut = {found: names for key, names in (SINKS if sinks_alone else CUT).items() if (found := _loaded(*key))}
    grouped = None if sinks_alone else _loaded(*GROUPED)
    row = () if sinks_alone or experts_whole else tuple(found for key in ROW if (found := _loaded(*key)))
    for module in chunk.modules():
        names = next((names for of, names in cut.items() if isinstance(module, of)), {})
        is_grouped = grouped is not None and isinstance(module, grouped)
        replicated = not sinks_alone and _has_replicas(module, is_grouped)
        for name, parameter in module.named_parameters(recurse=False):
            dim = names.get(name, names.get(name.rstrip("0123456789")) if is_grouped else None)
            if dim is not None and (replicated or not _fits(module, parameter, dim)):
                dim = None
            if dim is not None and _is_unset(parameter, is_grouped):
                _mark(parameter, dim, getattr(getattr(module, "bias", None), "partition_stride", 1))
            elif experts_whole and not getattr(parameter, "allreduce", True) and _is_unset(parameter):
                # The norm of experts is summed over ranks of which no other holds this parameter.
                parameter.tensor_model_parallel = True
        if isinstance(module, row) and module.parallel_mode is None:
            for name, parameter in module.named_parameters(recurse=False):
                if name.startswith("weight") and getattr(parameter, "partition_dim", -1) == 0:
                    parameter.partition_dim = 1
        if not sinks_alone:
            for parameter in _duplicated(module):
                parameter.tensor_model_parallel = False


def _loaded(module: str, name: str) -> Any:
    """The class, if anything has imported it and this release has it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None  # without Transformer Engine its layers are mocks


def _is_unset(parameter: Any, but_for_dim: bool = False) -> bool:
    """Whether no constructor has set the attributes. Trainers fill in (False, -1, 1) where there are none.

    but_for_dim: 0.18 sets partition_dim on grouped experts, and not the mark.
    """
    if getattr(parameter, "tensor_model_parallel", False):
        return False
    return but_for_dim or getattr(parameter, "partition_dim", -1) == -1


def _fits(module: Any, parameter: Any, dim: int) -> bool:
    """Whether the parameter has the size of a shard, where the layer says that. A subclass may hold all of it."""
    sizes = [size for name in SIZES if (size := getattr(module, name, None)) is not None]
    return not sizes or (dim < parameter.dim() and parameter.shape[dim] in sizes)


def _mark(parameter: Any, dim: int, stride: int) -> None:
    parameter.tensor_model_parallel = True
    if getattr(parameter, "partition_dim", -1) == -1:
        parameter.partition_dim, parameter.partition_stride = dim, stride


def _has_replicas(module: Any, is_grouped: bool) -> bool:
    """Whether this is an expert of which each tensor-parallel rank holds all, as another layer's replicated weight."""
    is_expert = is_grouped or getattr(module, "is_expert", False)
    parameters = module.parameters(recurse=False) if is_expert else ()
    together = any(getattr(parameter, "allreduce", True) for parameter in parameters)
    return together and not getattr(module, "explicit_expert_comm", True)


def _duplicated(module: Any) -> Iterator[Any]:
    """The marked parameters of a TELinear with parallel_mode="duplicated".

    The layer does not keep that, but its constructor leaves `sequence_parallel` on the weight in this mode alone.
    """
    linear, *cut = (_loaded(EXTENSIONS, name) for name in ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear"))
    if linear is None or not isinstance(module, linear) or getattr(module, "parallel_mode", None) is not None:
        return
    if any(of is not None and isinstance(module, of) for of in cut):
        return
    for parameter in module.parameters(recurse=False):
        if hasattr(parameter, "sequence_parallel") and getattr(parameter, "tensor_model_parallel", False):
            yield parameter


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    factory = functools.partial(_with_attributes, sinks_alone=variant == "v0_19")
    targets = [GET_MEGATRON_OPTIMIZER]
    if variant in ("v0_16", "v0_17"):
        targets.append(GET_MEGATRON_MUON_OPTIMIZER)
    return dict.fromkeys(targets, factory)
