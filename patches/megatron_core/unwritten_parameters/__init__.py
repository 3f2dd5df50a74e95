"""Attention sinks and biases of routers that nothing initialises.

What is wrong (0.15): DotProductAttention makes the sinks of softmax_type="learnable", and a router its bias with
add_bias_linear=True, by torch.empty, and neither is initialised. A model that no checkpoint fills trains from what lay
in the memory before, also from NaN.

The patch calls the config's init_method on both, as 0.16 does, if the config asks for initialisation. The random
numbers of the other parameters stay, up to the first such parameter.

Upstream: pull request 2033, in 0.16.

Delete when: megatron-core 0.15 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__"
ROUTER = "megatron.core.transformer.moe.router:Router.reset_parameters"


def _initialising(original: Function, name: str) -> Function:
    """name: of the parameter that `original` leaves as it is."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if self.config.perform_initialization and name in self._parameters and self._parameters[name] is not None:
            self.config.init_method(self._parameters[name])
        return found

    return method


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {
        ATTENTION: functools.partial(_initialising, name="softmax_offset"),
        ROUTER: functools.partial(_initialising, name="bias"),
    }
