"""Query, key and value weights that Muon splits by the shapes of other attention.

What is wrong: Muon orthogonalizes query, key and value of `linear_qkv` each by itself (`muon_split_qkv`, the default).
It takes their shapes from the config of the model, for all weights.
- Gated attention (0.16 to 0.18): with `attention_output_gate` a query group also has a gate, which the shapes leave
  out. Rows of query, gate, key and value are mixed, or the step raises a RuntimeError.
- Other attention in the model (0.16 to 0.20), such as a vision tower of another head size: its weights are split by the
  shapes of the language model. From 0.19 on they are not split at all unless their rows divide by these shapes.

What the patch does: when the optimizer is made, it gives each weight the shapes of the config of its attention, as 0.19
gives it those of the model. Up to 0.18 main parameters get them with the other attributes, and `orthogonalize` uses
them. It leaves alone weights whose rows on this rank are no whole query groups (fewer query groups than tensor-parallel
ranks): they raise up to 0.18, and are orthogonalized whole from 0.19 on. Multi-latent attention has no such weight. The
attributes stay on the parameters after shim.revert().

Upstream: the gate is fixed in 0.19 by pull request 4728, other attention is open.

Delete when: each weight has the shapes of its attention, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument
from shim.patches._views import view_with

MUON = "megatron.core.optimizer.muon:"
EMERGING = "megatron.core.optimizer.emerging_optimizers:"
COPY_ATTRIBUTES = "megatron.core.tensor_parallel.layers:copy_tensor_model_parallel_attributes"

SHAPES = "qkv_split_shapes"  # the name of the attribute in 0.19


def _with_shapes(original: Function) -> Function:
    chunks_of = argument(original, "model_chunks")

    @functools.wraps(original)
    def with_shapes(*args: Any, **kwargs: Any) -> Any:
        _give_shapes(chunks_of(args, kwargs))
        return original(*args, **kwargs)

    return with_shapes


def _give_shapes(chunks: Iterable[Any]) -> None:
    for chunk in chunks:
        for attention in chunk.modules():
            weight = getattr(getattr(attention, "linear_qkv", None), "weight", None)
            if weight is None or weight.dim() != 2:
                continue
            shapes = _shapes(attention.config)
            if weight.shape[0] % sum(shapes) == 0:
                weight.is_qkv, weight.qkv_split_shapes = True, shapes


def _shapes(config: Any) -> list[int]:
    """How many rows of a query group are its queries, its gates, if it has any, its key and its value."""
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gates = [queries] if getattr(config, "attention_output_gate", False) else []
    return [queries, *gates, config.kv_channels, config.kv_channels]


def _orthogonalize(original: Function) -> Function:
    weight_of = argument(original, "p")

    @functools.wraps(original)
    def orthogonalize(*args: Any, **kwargs: Any) -> Any:
        optimizer, shapes = args[0], getattr(weight_of(args, kwargs), SHAPES, None)
        if shapes is None or shapes == optimizer.qkv_split_shapes:
            return original(*args, **kwargs)
        return original(view_with(optimizer, qkv_split_shapes=shapes), *args[1:], **kwargs)

    return orthogonalize


def _copy_attributes(original: Function) -> Function:
    destination_of, source_of = argument(original, "destination_tensor"), argument(original, "source_tensor")

    @functools.wraps(original)
    def copy_tensor_model_parallel_attributes(*args: Any, **kwargs: Any) -> Any:
        copied = original(*args, **kwargs)
        shapes = getattr(source_of(args, kwargs), SHAPES, None)
        if shapes is not None:
            setattr(destination_of(args, kwargs), SHAPES, shapes)
        return copied

    return copy_tensor_model_parallel_attributes


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    module, make = (
        (MUON, "get_megatron_muon_optimizer") if variant == "v0_16" else (EMERGING, "_create_emerging_optimizer")
    )
    if variant == "v0_19":
        return {module + make: _with_shapes}
    return {
        module + make: _with_shapes,
        module + "TensorParallelMuon.orthogonalize": _orthogonalize,
        COPY_ATTRIBUTES: _copy_attributes,
    }
