"""megatron-core's vocab-parallel cross entropy through shim.ops.token_logprobs.

What is slow or large (0.12 to 0.19):
- vocab_parallel_cross_entropy makes an fp32 copy of half-precision logits and keeps it as softmax: 1.5 fp32 logits at
  its peak, and three all-reduces. fp32 logits are overwritten in forward, under the eyes of whoever still reads them.
- fused_vocab_parallel_cross_entropy takes 2.5 fp32 logits, and rounds every gradient to bf16, that of fp32 logits too.
- Tokens without a target (-100) get a gradient.

What the patch does: both functions return the negative log-probability that shim.ops has: the logits are saved as they
are, one gradient in their dtype, one all-gather forward and nothing backward. Logits in fp32 that were computed are
overwritten too, as stock does, but in backward and with their gradient: who needs them in a backward of his own gets
autograd's error. Logits that are a leaf, or whose memory another tensor has, get a gradient of their own, and so do
those that are few (at most 2 MiB in fp32), for which there is a shorter way. Negative targets mean no target:
a loss and a gradient of zero. A target beyond the vocabulary is an error; stock returned a wrong loss.

Labels are smoothed over the whole vocabulary, as by label-smoothing, which mends that alone. With both applied, this
patch is the outer one, and the other is not reached.

With option fp32_output=False, Float16Module hands logits out as the model made them instead of a copy in fp32, unless
the caller asks by the keyword fp32_output, which 0.12 to 0.14 get here. Losses are fp32 either way.

Upstream: open. Delete when the functions save no softmax.

Not covered: cross_entropy_fusion_impl="te". Transformer Engine's kernel needs no memory beyond the logits, because it
overwrites them with the gradient in forward already; whoever chooses it gets it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function, add_parameters
from shim.patches.megatron_core._token_losses import token_losses

PLAIN = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
FUSED = "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
FORWARD = "megatron.core.transformer.module:Float16Module.forward"
UPCAST = "megatron.core.transformer.module:float16_to_fp32"


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
    """From 0.15: another default for the keyword."""

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return original(self, *inputs, **{"fp32_output": fp32_output, **kwargs})

    return forward


class _Output(threading.local):
    """Whether the Float16Module whose forward this thread is in returns fp32."""

    fp32 = True


_OUTPUT = _Output()


def _forward_with_keyword(original: Function, fp32_output: bool) -> Function:
    """Up to 0.14: the keyword, for the upcast below."""

    def forward(self: Any, *inputs: Any, fp32_output: bool = fp32_output, **kwargs: Any) -> Any:
        outer, _OUTPUT.fp32 = _OUTPUT.fp32, fp32_output
        try:
            return original(self, *inputs, **kwargs)
        finally:
            _OUTPUT.fp32 = outer

    signature = inspect.signature(forward)
    functools.update_wrapper(forward, original)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _upcast(original: Function) -> Function:
    @functools.wraps(original)
    def float16_to_fp32(val: Any) -> Any:
        return original(val) if _OUTPUT.fp32 else val

    return float16_to_fp32


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    forward = {"upcast": _forward_with_keyword, "fp32_output": _forward}[variant]
    found: dict[str, Callable[[Function], Function]] = {
        PLAIN: _vocab_parallel_cross_entropy,
        FUSED: _fused_vocab_parallel_cross_entropy,
        FORWARD: functools.partial(forward, fp32_output=bool(options["fp32_output"])),
    }
    return {**found, UPCAST: _upcast} if variant == "upcast" else found
