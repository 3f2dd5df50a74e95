"""A quantized tensor says whether it requires a gradient.

What is wrong (2.14 to 2.17): QuantizedTensor keeps in Python whether it requires a gradient, as it was when the tensor
was made. Autograd decides later, and in C++: a quantized tensor that an autograd function returns, such as a weight
that is cast in the forward pass, says False though it requires a gradient. Modules ask the tensor, and compute no
gradient then.

The patch: the answer is that of torch. Setting it stays upstream's.

The answer takes half a microsecond. That of stock takes 0.1, because it asks nobody.

Upstream: fixed in 2.18 by pull request 3172, which drops the property.

Delete when: Transformer Engine 2.17 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim._torch_names import required

REQUIRES_GRAD = "transformer_engine.pytorch.quantized_tensor:QuantizedTensor.requires_grad"


def _requires_grad(original: Any) -> property:
    attribute: Any = torch.Tensor.requires_grad
    ask, plain = attribute.__get__, required("torch:_C.DisableTorchFunctionSubclass")

    @functools.wraps(original.fget)
    def requires_grad(self: Any) -> bool:
        with plain():  # else torch looks for upstream's __torch_function__, which does this, for microseconds
            return bool(ask(self))

    return property(requires_grad, original.fset, original.fdel, original.__doc__)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object, here a property, and returns another."""
    return {REQUIRES_GRAD: _requires_grad}
