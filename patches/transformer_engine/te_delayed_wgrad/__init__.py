"""Weight gradients that Transformer Engine delays are added to those that are there, as autograd adds.

What is wrong, if a module is made with delay_wgrad_compute=True (2.3 to 2.20.2): backward_dw() writes the gradients of
weights and biases into `grad` by itself.
- 2.8 and later: it assigns the gradient of a weight, so that the one before is lost, unless fuse_wgrad_accumulation is
  set. So two modules with one weight get the gradient of one of them, and of several microbatches only the last counts.
- 2.3 to 2.7: if there is a gradient, the new one of a weight is dropped.
- 2.3 to 2.20.2: that of a bias is dropped, also with fuse_wgrad_accumulation.
- 2.8 and later: without fuse_wgrad_accumulation, backward of GroupedLinear gives autograd the memory for the gradients
  of weights before anything is in it, so that the gradients that are there get random numbers added.
From 0.15 on a hook of megatron-core's DistributedDataParallel takes each gradient away, so that it meets none of this.
Code without such a hook does.

The patch: backward_dw() of Linear, LayerNormLinear, LayerNormMLP and GroupedLinear runs as it is. Before its hooks run,
which read `grad`, the earlier gradient gets the new one added, in its own memory. A bias whose gradient autograd has
computed in backward, as under FP8, gets nothing twice. Backward of GroupedLinear gives no gradient that is delayed.

- Without an earlier gradient nothing is done.
- A CUDA graph that is being captured stays as it is: each replay would add.
- Not covered: weights that `parameters_split` splits into several, whose delayed gradients stock writes nowhere.

Upstream: open (issue 3437, pull request 3552).

Delete when: backward_dw adds, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function

MODULES = "transformer_engine.pytorch.module."
LINEAR = MODULES + "base:TransformerEngineBaseModule.backward_dw"
GROUPED_LINEAR = MODULES + "grouped_linear:GroupedLinear.backward_dw"
GROUPED_BACKWARD = MODULES + "grouped_linear:_GroupedLinear.backward"
MLP = MODULES + "layernorm_mlp:LayerNormMLP.backward_dw"

# What a module took from its store, which number that was -> the names of parameters with their gradients. A bias
# whose gradient came another way has None or an empty tensor.
Named = Callable[[Any, Any, int], Iterator[tuple[str, Any]]]


def _of_linear(module: Any, taken: Any, number: int) -> Iterator[tuple[str, Any]]:
    (of_weight, of_bias, *_), _ = taken
    for names, gradient in ((module.weight_names, of_weight), (module.bias_names, of_bias)):
        if len(names) == 1:
            yield names[0], gradient


def _of_grouped_linear(module: Any, taken: Any, number: int) -> Iterator[tuple[str, Any]]:
    (_, of_biases, *_), (_, _, of_weights, *_) = taken
    for kind, gradients in (("weight", of_weights), ("bias", of_biases)):
        if isinstance(gradients, (list, tuple)):
            yield from ((f"{kind}{index}", gradient) for index, gradient in enumerate(gradients))


def _of_mlp(module: Any, taken: Any, number: int) -> Iterator[tuple[str, Any]]:
    (of_weight, of_bias, *_), _ = taken
    layer = ("fc2", "fc1")[number]
    yield from ((f"{layer}_weight", of_weight), (f"{layer}_bias", of_bias))


class _Earlier:
    """The gradients that a module's parameters have before backward_dw, which get the new ones added."""

    def __init__(self, module: Any, named: Named) -> None:
        self.module, self.named = module, named
        parameters = module.named_parameters(recurse=False)
        self.there = [(name, p, p.grad, p.grad._version) for name, p in parameters if p.grad is not None]
        self.new: dict[str, Any] = {}
        self.taken = 0

    def take(self, pop: Callable[[], Any]) -> Any:
        taken = pop()
        kinds = ("bias",) if self.module.fuse_wgrad_accumulation else ("bias", "weight")  # fused weights are added
        names = {name for name, *_ in self.there if any(kind in name for kind in kinds)}
        self.new |= {name: new for name, new in self.named(self.module, taken, self.taken) if name in names}
        self.taken += 1
        return taken

    @torch.no_grad()
    def add(self) -> None:
        for name, parameter, earlier, version in self.there:
            if parameter.grad is not earlier:  # assigned
                if parameter.grad is not None:
                    earlier.add_(parameter.grad)
                    parameter.grad = earlier
            elif earlier._version == version:  # else it was added to
                new = self.new.get(name)
                if isinstance(new, Tensor) and new.numel():
                    earlier.add_(new.view_as(earlier))
        self.there, self.new = [], {}


def _adding(original: Function, named: Named) -> Function:
    @functools.wraps(original)
    def backward_dw(self: Any) -> Any:
        store = self.wgrad_store
        if store is None or not store.delay_wgrad_compute() or torch.cuda.is_current_stream_capturing():
            return original(self)
        earlier = _Earlier(self, named)
        if not earlier.there:
            return original(self)
        hooks = getattr(self, "wgrad_accumulation_and_reduce_hooks", [])  # from 2.7 on
        hooks.insert(0, earlier.add)
        store.pop = functools.partial(earlier.take, store.pop)
        try:
            return original(self)
        finally:
            del store.pop
            hooks.remove(earlier.add)
            earlier.add()

    return backward_dw


def _without_unwritten(original: Function) -> Function:
    """Of a GroupedLinear: without gradients of weights whose products wait for backward_dw."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        grads = original(*args, **kwargs)
        ctx = args[0]
        store = ctx.wgrad_store
        if ctx.fuse_wgrad_accumulation or store is None or not store.delay_wgrad_compute():
            return grads
        biases = 1 if getattr(ctx, "single_grouped_bias", False) else ctx.num_gemms
        weights = 1 if getattr(ctx, "single_grouped_weight", False) else ctx.num_gemms
        first = len(grads) - biases - weights
        return (*grads[:first], *[None] * weights, *grads[first + weights :])

    return backward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    backward = {} if variant == "v2_3" else {GROUPED_BACKWARD: _without_unwritten}
    return {
        LINEAR: functools.partial(_adding, named=_of_linear),
        GROUPED_LINEAR: functools.partial(_adding, named=_of_grouped_linear),
        MLP: functools.partial(_adding, named=_of_mlp),
        **backward,
    }
