"""backward_dw() of Transformer Engine's layers takes frozen weights, for which nothing was delayed.

What is wrong, if a layer is made with delay_wgrad_compute=True (2.3 to 2.20): backward leaves a product for each
trained weight, and backward_dw() takes one for each weight. With a frozen weight, as under LoRA, it raises "Pop empty
queue": Linear, LayerNormLinear, LayerNormMLP if either of its two is frozen, and GroupedLinear up to 2.13. From 2.14 on
GroupedLinear returns without the hooks that reduce the gradients of its trained biases. Frozen biases, and frozen
experts beside trained ones, get a gradient that nobody asked for, which norms over all gradients count.

The patch: before backward_dw() runs as it is, an entry that gives no gradient joins the queue for each frozen weight,
in its place. Afterwards frozen parameters have no gradient.

- If nothing of the layer is frozen, nothing is done.
- A GroupedLinear whose first weight alone is frozen has no product for the others: see te-frozen-experts.

Upstream: open, not reported. 2.14 only looks whether the queue of GroupedLinear is empty.

Delete when: backward_dw knows which weights are frozen, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function

MODULES = "transformer_engine.pytorch.module."
LINEAR = MODULES + "base:TransformerEngineBaseModule.backward_dw"
GROUPED_LINEAR = MODULES + "grouped_linear:GroupedLinear.backward_dw"
MLP = MODULES + "layernorm_mlp:LayerNormMLP.backward_dw"

# The places in the queue where a module's products are missing, with what stands there: tensors and results.
Missing = Callable[[Any], Iterator[tuple[int, list[Any], tuple[Any, ...]]]]


class _Nothing:
    """In the place of a gradient, or of one for each expert, that a frozen weight does not have."""

    @property
    def rowwise_data(self) -> _Nothing:
        return self

    def __getitem__(self, index: int) -> _Nothing:
        return self

    def view(self, *shape: int) -> _Nothing:
        return self

    def to(self, dtype: Any) -> None:
        return None

    def numel(self) -> int:
        return 0


NOTHING = _Nothing()


def _trained(module: Any, kind: str) -> bool:
    return any(p.requires_grad for name, p in module.named_parameters(recurse=False) if name.startswith(kind))


def _of_linear(module: Any, results: int) -> Iterator[tuple[int, list[Any], tuple[Any, ...]]]:
    if not any(getattr(module, name).requires_grad for name in module.weight_names):
        yield 0, [], (NOTHING,) * results


def _of_grouped_linear(module: Any) -> Iterator[tuple[int, list[Any], tuple[Any, ...]]]:
    if not _trained(module, "weight"):
        yield 0, [None, None, NOTHING], (None, [NOTHING] * module.num_gemms, None)


def _of_mlp(module: Any) -> Iterator[tuple[int, list[Any], tuple[Any, ...]]]:
    for place, name in enumerate(("fc2_weight", "fc1_weight")):
        weight = getattr(module, name)
        if not weight.requires_grad:  # blockwise FP8 sums the rows of the first tensor
            yield place, [weight.detach()[:0, :1].expand(0, len(weight))], (NOTHING, NOTHING)


def _knowing(original: Function, missing: Missing) -> Function:
    @functools.wraps(original)
    def backward_dw(self: Any) -> Any:
        store = self.wgrad_store
        frozen = [p for p in self.parameters(recurse=False) if not p.requires_grad]
        if store is None or not store.delay_wgrad_compute() or not frozen:
            return original(self)
        for place, tensors, results in missing(self):
            store.context.queue.insert(place, [tensors, lambda *_, results=results: results])
        try:
            return original(self)
        finally:
            for parameter in frozen:
                parameter.grad = None

    return backward_dw


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    of_linear = functools.partial(_of_linear, results=4 if variant == "v2_3" else 2)
    return {
        LINEAR: functools.partial(_knowing, missing=of_linear),
        GROUPED_LINEAR: functools.partial(_knowing, missing=_of_grouped_linear),
        MLP: functools.partial(_knowing, missing=_of_mlp),
    }
