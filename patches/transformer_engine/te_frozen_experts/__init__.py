"""Experts are trained beside frozen ones in Transformer Engine's GroupedLinear, whichever is the first.

What is wrong (2.1 to 2.20): GroupedLinear asks its first weight for all whether they are trained. So if some experts of
a rank are trained and the others frozen, as ESFT does,
- with a frozen first weight the trained weights get no gradient, in silence, and never move; without FP8 their biases
  get none either. Under delay_wgrad_compute, 2.3 to 2.13 raise "Pop empty queue" instead.
- with a trained first weight and fuse_wgrad_accumulation (megatron-core's gradient_accumulation_fusion) the step ends
  with an AttributeError: a frozen weight has no main_grad.

The patch: the function of GroupedLinear gets a stand-in for each frozen weight, which shares its memory. The one of
the first says that it is trained, and autograd drops its gradient. With fused accumulation no product is computed for
frozen experts, which have no memory for one; their biases get the sum of the output's gradient. If all weights of a
rank are trained, or none is, nothing is done.

Not covered: the native path of grouped tensors (2.17 and later, `use_grouped_tensor`) together with fused accumulation,
for which it raises an error that says so, and weights that are distributed (2.20).

Upstream: open, not reported.

Delete when: GroupedLinear asks each weight, and the releases before are not supported.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim._errors import ShimError
from shim.patches._arguments import Function

FORWARD = "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward"
PRODUCTS = "transformer_engine.pytorch.cpp_extensions.gemm:general_grouped_gemm"
OF_FIRST = ("overwrite_main_grad", "__fsdp_param__")  # what upstream asks of the first weight, for all


def _stand_in(frozen: Tensor, trained: Tensor, first: bool) -> Tensor:
    """What upstream sees in the place of a frozen weight. trained: one beside it."""
    weight: Any = frozen.detach()
    weight.main_grad, weight.get_main_grad = None, lambda: None
    if first:
        weight.requires_grad_()
        for name in OF_FIRST:
            if hasattr(trained, name):
                setattr(weight, name, getattr(trained, name))
    return weight


def _forward(original: Function) -> Function:
    kinds = [parameter.kind for parameter in inspect.signature(original).parameters.values()]
    start = kinds.index(inspect.Parameter.VAR_POSITIONAL)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = args[start:]
        weights = list(itertools.takewhile(lambda tensor: tensor.shape == tensors[0].shape, tensors))
        trained = [weight for weight in weights if weight.requires_grad]
        some = 0 < len(trained) < len(weights) and weights[0].dim() == 2
        if args[0] is None or not some or getattr(weights[0], "is_distributed_weight", False):
            return original(*args, **kwargs)
        seen = [
            weight if weight.requires_grad else _stand_in(weight, trained[0], weight is weights[0])
            for weight in weights
        ]
        ctx = args[0]
        ctx.shim_stand_ins = seen  # upstream keeps weak references
        output = original(*args[:start], *seen, *tensors[len(weights) :], **kwargs)
        native = getattr(ctx, "grouped_tensor_supported", False) or getattr(ctx, "use_grouped_tensor_path", False)
        if native and ctx.fuse_wgrad_accumulation:
            raise ShimError(
                "te-frozen-experts: GroupedLinear has trained and frozen weights, and its native path of grouped "
                "tensors cannot leave frozen ones out of fused accumulation. Switch off that path "
                "(use_grouped_tensor=False) or gradient_accumulation_fusion"
            )
        return output

    return forward


def _general_grouped_gemm(original: Function) -> Function:
    @functools.wraps(original)
    def general_grouped_gemm(A: Any, B: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        kept = [index for index, output in enumerate(out) if output is not None]
        if len(kept) == len(out):
            return original(A, B, out, *args, **kwargs)

        def of_kept(value: Any) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == len(out)
            return [value[index] for index in kept] if is_list else value

        more = {name: of_kept(value) for name, value in kwargs.items()}
        _, of_biases, rest = original(of_kept(A), of_kept(B), of_kept(out), *map(of_kept, args), **more)
        with_biases = kwargs.get("grad") and kwargs.get("use_bias")
        products = dict(zip(kept, of_biases))
        found = [
            products[index] if index in products else B[index].sum(0) if with_biases else of_biases[0]
            for index in range(len(out))
        ]
        return out, found, rest

    return general_grouped_gemm


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {FORWARD: _forward, PRODUCTS: _general_grouped_gemm}
