"""Which output layers fused-linear-logprob takes, and views of them that return promises of logits.

A layer is a ColumnParallelLinear, or one that Megatron-Bridge has wrapped with a LoRA adapter. The wrapper's own
forward runs, on a view of it. The two linear layers that make logits there promise them instead: the wrapped one, and
the adapter's second one. So dropout, the gather of sequence-parallel shards and the scale are the adapter's own, and
only its states of rank r exist as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from shim.patches._views import view_with
from shim.patches.megatron_core._linear_losses import Head, head_of
from shim.patches.megatron_core._promised_logits import Promise

__all__ = ["obstacle_of", "promising"]

# Layers whose forward is a product with the weight. The second (dev) has a loss of its own besides.
PLAIN = {
    "megatron.core.tensor_parallel.layers": "ColumnParallelLinear",
    "megatron.core.transformer.linear_cross_entropy": "LinearCrossEntropyModule",
}
# Megatron-Bridge 0.1 to 0.6, which verl, NeMo-RL and SkyRL use too: `to_wrap(x) + adapter(x)`, where the adapter is
# `linear_out(activation(linear_in(dropout(x)))) * number`.
ADAPTED = {"megatron.bridge.peft.lora_layers": "LoRALinear"}
ADAPTERS = {"megatron.bridge.peft.utils": "ParallelLinearAdapter"}


def obstacle_of(layer: Any) -> str | None:
    """Why the losses cannot be made without this output layer's logits, in words; None if they can."""
    if not _is_one_of(layer, ADAPTED):
        return _obstacle_of_plain(layer)
    adapter = layer.adapter
    if not _is_one_of(adapter, ADAPTERS):
        return f"the adapter of the output layer is a {type(adapter).__name__}"
    if _has_hooks(layer) or _has_hooks(adapter):
        return "hooks on the adapter of the output layer want its logits, or their gradient"
    if adapter.dropout_position == "post" and getattr(adapter.dropout, "p", 0) > 0:
        return "the adapter of the output layer has its dropout on logits"
    second = adapter.linear_out
    if _is_one_of(second, PLAIN) and (second.gather_output or second.sequence_parallel):
        return "the adapter of the output layer gathers its logits or its states"
    return _obstacle_of_plain(layer.to_wrap) or _obstacle_of_plain(second)


def _obstacle_of_plain(layer: Any) -> str | None:
    if not _is_one_of(layer, PLAIN):
        return f"the output layer is a {type(layer).__name__} with a forward of its own"
    if layer._modules:
        return f"the output layer has a module of its own: {', '.join(layer._modules)}"
    if _has_hooks(layer):
        return "hooks on the output layer want its logits, or their gradient"
    if layer.bias is not None:
        return "the output layer has a bias"
    if layer.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute needs the gradient of the logits"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "the weight of the output layer is in shards (GTP)"
    if layer.explicit_expert_comm:
        return "the output layer belongs to an expert"
    return None


def _is_one_of(layer: Any, known: dict[str, str]) -> bool:
    """Whether it has exactly one of these classes, and no forward of its own."""
    classes = [getattr(sys.modules.get(module), name, None) for module, name in known.items()]
    return type(layer) in classes and "forward" not in vars(layer)


def _has_hooks(layer: Any) -> bool:
    return bool(layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def promising(layer: Any, say: Callable[[str], None], predicts: bool = False) -> Any:
    """A view of an output layer without an obstacle, which returns promises. `say` hears why a call makes logits.

    predicts: see Promise.
    """
    if not _is_one_of(layer, ADAPTED):
        return _promising(layer, say, predicts)
    second = _promising(layer.adapter.linear_out, say, predicts)
    adapter = view_with(layer.adapter, linear_out=second)
    return view_with(layer, to_wrap=_promising(layer.to_wrap, say, predicts), adapter=adapter)


def _promising(layer: Any, say: Callable[[str], None], predicts: bool) -> Any:
    def forward(input_: Any, weight: Any = None, runtime_gather_output: Any = None, **others: Any) -> Any:
        head = head_of(layer, input_, weight, runtime_gather_output)
        if others:
            head = f"the output layer is given {', '.join(others)}"
        if isinstance(head, Head):
            return Promise.of(head, predicts), None
        say(head)
        return layer.forward(input_, weight=weight, runtime_gather_output=runtime_gather_output, **others)

    return view_with(layer, forward=forward)
