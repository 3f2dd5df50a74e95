"""Activation recompute of layers with adapters behind frozen embeddings.

What is wrong (0.12 to 0.20): if the base weights are frozen, as under LoRA, the embeddings require no gradient.
- The output of a checkpoint requires a gradient only if an input does. With recompute_granularity="full" no layer of
  the decoder gets one. Adapters in the decoder silently do not train. If all adapters are there, backward raises.
- With recompute_modules=["layernorm"] the norms in front of the first adapter save nothing for their recompute, and
  backward raises a TypeError (StopIteration in 0.20). With torch 2.12 and earlier it raises a RuntimeError instead:
  "Trying to backward through the graph a second time".
- 0.20 has hyper connections. With recompute_modules=["mhc"] those in front of the first adapter are recomputed in the
  same way, and backward raises StopIteration, if they are frozen as well.

The patch makes the hidden states [s, b, h] that enter a block require a gradient, if none is required yet, the block
has trainable weights, and layers, norms or frozen hyper connections are recomputed. Trainers whose hook makes the
embeddings require a gradient see no change.

Upstream: open.

Not covered: norms in the stack of a hybrid model, which `hybrid-frozen-norms` is about, and other single modules
(recompute_granularity="selective") in front of the first adapter. Stock is right if adapters come before such a module,
and the patch would cost that case memory. In front of the first adapter, tensor_parallel.checkpoint does not train the
adapters inside the module, and CheckpointWithoutOutput (moe_act, mla_up_proj) makes backward raise the TypeError,
because it saved nothing for the recompute. The remedy for both: make the embeddings require a gradient by a hook on
their output.

Delete when: TransformerBlock lets what it recomputes from require a gradient, and the releases before that are not
supported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._stubs import WIDTH, Embedding, config_of, device_of, holder_of, view_of
from shim.patches.megatron_core._trained_states import from_trained_states

BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock."
FUNCTION = "megatron.core.recompute:checkpointed_forward"


def _checkpointed_forward(original: Function) -> Function:
    """Runs under full recompute only."""
    return from_trained_states(original, lambda block: True)


def _forward(original: Function) -> Function:
    return from_trained_states(original, _discards_first_outputs)


def _discards_first_outputs(block: Any) -> bool:
    """Whether the first modules of the block are recomputed by CheckpointWithoutOutput, and need a gradient for it."""
    config = block.config
    modules = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
    if "layernorm" in modules or "mhc" not in modules:
        return "layernorm" in modules
    if not len(block.layers):
        return False  # a pipeline stage without layers
    # A hyper connection hands what it has computed with its weights to the checkpoint, so trained ones are enough.
    first = getattr(block.layers[0], "self_attention_hyper_connection", None)
    return first is None or not any(weight.requires_grad for weight in first.parameters())


class _Layer:
    """In the place of the layers: multiplies by a weight, and notes whether its input requires a gradient."""

    layer_number = 1

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.full((), 3.0, device=device, requires_grad=True)
        self.required = False

    def parameters(self) -> Iterator[torch.Tensor]:
        yield self.weight

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.required |= hidden_states.requires_grad
        return hidden_states * self.weight, None


class _Layers(list[_Layer]):
    def parameters(self) -> Iterator[torch.Tensor]:
        return (weight for layer in self for weight in layer.parameters())


class _Rotary:
    """In the place of rotary embeddings, whose caches a tiny row would change."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return 3

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(3, 1, 1, 2)


def _embeddings_require_grad(block: Any, models: list[Any]) -> bool:
    """Whether the model of the block makes what it embeds require a gradient, by its own _preprocess."""
    model = holder_of(block, "decoder", models)
    if not hasattr(model, "_preprocess") or not hasattr(model, "embedding"):
        return False
    view = view_of(model, config_of(model), embedding=Embedding(), rotary_pos_emb=_Rotary(), training=True)
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device_of(block))
    try:
        made = view._preprocess(input_ids=ids, position_ids=ids)
    except Exception:  # noqa: BLE001 - it is not this method that is judged, so an error only means that nothing is known
        return False
    states = made[0] if isinstance(made, tuple) else None
    return isinstance(states, torch.Tensor) and states.requires_grad


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """Runs one layer behind states that require no gradient. See docs/patch-modules.md."""
    config = module.config
    full = config.recompute_granularity == "full"
    if not (full or _discards_first_outputs(module)) or {w.requires_grad for w in module.parameters()} != {True, False}:
        return True  # nothing is recomputed, or nothing is frozen, or nothing is trained
    device = device_of(module)
    layer = _Layer(device)
    view = view_of(
        module,
        config_of(module, fp8=None, fp4=None, cpu_offloading=False, recompute_num_layers=1),
        layers=_Layers([layer]),
        num_layers_per_pipeline_rank=1,
        pre_process=True,
        final_layernorm=None,
        offload_context=contextlib.nullcontext(),
        training=True,
    )
    output = view.forward(torch.ones(3, 1, WIDTH, device=device), None)
    # A recomputed layer runs without gradients first, so only backward shows whether it is trained.
    if full and output.requires_grad:
        output.sum().backward()
    if layer.weight.grad is not None if full else layer.required:
        return True
    if _embeddings_require_grad(module, models):
        return True
    return "adapters are trained only if the embeddings' output requires a gradient, as by a hook"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    full = {"v0_12": BLOCK + "_checkpointed_forward", "v0_18": FUNCTION}[variant]
    return {full: _checkpointed_forward, BLOCK + "forward": _forward}
