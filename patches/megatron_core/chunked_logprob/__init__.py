"""megatron-core's vocab-parallel cross entropy: tokens without a target, and, if asked, shim.ops.token_logprobs.

What is wrong (0.12 to 0.20): tokens without a target (-100) have a loss, and get a gradient.

What is slow or large:
- vocab_parallel_cross_entropy copies half-precision logits to fp32 and keeps the copy as softmax. Its peak is 1.5 times
  the logits in fp32, and it needs three all-reduces. It overwrites fp32 logits in forward, while others may still read
  them.
- fused_vocab_parallel_cross_entropy peaks at 2.5 times the logits in fp32. It rounds every gradient to bf16, also that
  of fp32 logits.

The patch: the loss and the gradient of a token with a negative target are zero. All other bits are stock's.

With option rounding=True, which shim.apply(rounding=True) sets, both functions return the negative log-probability that
shim.ops computes. It is as exact as stock's, and rounds in another order.
- shim.ops saves the logits as they are and makes one gradient in their dtype. It needs one all-gather in forward and no
  collective in backward.
- Computed fp32 logits are overwritten, as stock does, but in backward and with their gradient. Code that needs those
  logits in another backward pass gets autograd's error.
- Some logits get a separate gradient: leaves, logits that share memory with another tensor, and few logits (at most 2
  MiB in fp32). Few logits take a shorter path.
- A target beyond the vocabulary is an error; stock returned a wrong loss.
- Labels are smoothed over the whole vocabulary. label-smoothing fixes that alone. With both patches applied, this one
  is the outer layer, and calls never reach the other.

Either way, under option fp32_output=False Float16Module returns logits as the model made them, instead of a copy in
fp32. The caller can still ask for fp32 by the keyword fp32_output, which the patch adds to 0.12 to 0.14. The losses are
fp32 all the same.

Upstream: open.

Not covered: cross_entropy_fusion_impl="te". Transformer Engine up to 2.17 overwrites the logits with the gradient in
forward, so it needs no memory beyond the logits; te-cross-entropy fixes its gradients. From 2.18 on it keeps a copy of
the logits, which te-cross-entropy-copy spares.

Delete when: both functions save no softmax, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, add_parameters, argument
from shim.patches.megatron_core._token_losses import token_losses

PLAIN = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
FUSED = "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
FORWARD = "megatron.core.transformer.module:Float16Module.forward"
UPCAST = "megatron.core.transformer.module:float16_to_fp32"


def _without_ignored(original: Function) -> Function:
    """Upstream's function, whose losses of tokens without a target are taken out, and their gradients by that."""
    target_of = argument(original, "target")

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        losses: Tensor = original(*args, **kwargs)
        ignored = target_of(args, kwargs) < 0
        # On CPU the host may look: a call without ignored tokens adds nothing to the graph.
        if ignored.device.type == "cpu" and not torch.compiler.is_compiling() and not ignored.any():
            return losses
        return losses.masked_fill(ignored, 0.0)

    return wrapper


def _vocab_parallel_cross_entropy(original: Function) -> Function:
    @functools.wraps(original)
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        return token_losses(vocab_parallel_logits, target, group, label_smoothing)

    add_parameters(vocab_parallel_cross_entropy, original, "tp_group")
    return vocab_parallel_cross_entropy


def _fused_vocab_parallel_cross_entropy(original: Function) -> Function:
    @functools.wraps(original)
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
        return token_losses(vocab_parallel_logits, target, tp_group)

    return fused_vocab_parallel_cross_entropy


# Float16Module's output


def _forward(original: Function, fp32_output: bool) -> Function:
    """From 0.15: the keyword gets another default."""

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return original(self, *inputs, **{"fp32_output": fp32_output, **kwargs})

    return forward


_AS_MADE = Ambient(__name__)  # whether the Float16Module that runs returns its output as the model made it


def _forward_with_keyword(original: Function, fp32_output: bool) -> Function:
    """Up to 0.14: adds the keyword. `_upcast` reads its value."""

    def forward(self: Any, *inputs: Any, fp32_output: bool = fp32_output, **kwargs: Any) -> Any:
        return _AS_MADE.call(not fp32_output, original, self, *inputs, **kwargs)

    functools.update_wrapper(forward, original)
    signature = inspect.signature(original)
    *known, rest = signature.parameters.values()  # the last one is **kwargs
    added = inspect.Parameter("fp32_output", inspect.Parameter.KEYWORD_ONLY, default=fp32_output)
    forward.__signature__ = signature.replace(parameters=[*known, added, rest])  # type: ignore[attr-defined]
    return forward


def _upcast(original: Function) -> Function:
    @functools.wraps(original)
    def float16_to_fp32(val: Any) -> Any:
        return val if _AS_MADE.value else original(val)

    return float16_to_fp32


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    forward = {"v0_12": _forward_with_keyword, "v0_15": _forward}[variant]
    may_round = bool(options["rounding"])
    found: dict[str, Callable[[Function], Function]] = {
        PLAIN: _vocab_parallel_cross_entropy if may_round else _without_ignored,
        FUSED: _fused_vocab_parallel_cross_entropy if may_round else _without_ignored,
        FORWARD: functools.partial(forward, fp32_output=bool(options["fp32_output"])),
    }
    return {**found, UPCAST: _upcast} if variant == "v0_12" else found
