"""Layers of fused operations run the hooks that their parts have now.

What is wrong (TEFusedMLP, 0.15 to 0.20, and TEFusedResidualRMSNorm, 0.17 to 0.20): with use_transformer_engine_op_fuser
such a layer does not call its parts, and runs their hooks itself: those that it found in its first forward. Under
overlap_param_gather these hooks wait for the all-gather of the weights. A trainer that has them off in its first step,
as megatron.training has, never gets them: later steps silently multiply by weights that are not all there. If they are
on at first, they run on in an evaluation that has disabled them.

The patch: at each forward the layer looks which hooks its parts have. If they have changed, upstream's function reads
them anew, on an object of the patch's own, whose hooks then run. So its warnings and errors come where they came, and
for hooks that are added later. It sees the parts alone: hooks of the layer itself run where it is called, and on stock
once more.

A look costs a few microseconds on the host. Experts of TEGroupedMLP look at each forward on stock.

Not covered: the norm of TEFusedMLPWithGroupedLinear, which reads its weight before the hooks run (pull request 6654).

Upstream: fixed on main by pull request 6132 for TEFusedMLP, in no release.

Delete when: the layers look their hooks up at each forward, and the releases before are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from shim.patches._arguments import Function

MODULE = "megatron.core.extensions.transformer_engine:"
MLP = MODULE + "TEFusedMLP._register_hooks_on_fused_impl"
RESIDUAL_RMSNORM = MODULE + "TEFusedResidualRMSNorm._register_hooks_on_fused_impl"
KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Emulated:
    """The hooks of a layer's parts, as upstream's function runs them in their place."""

    def __init__(self, layer: nn.Module, read: Callable[[Any, nn.Module], Any]) -> None:
        self.layer, self.read = layer, read
        self.look()

    def look(self) -> None:
        parts = self._parts()
        seen, target = self._hooks(parts), nn.Module()
        self.read(SimpleNamespace(modules=lambda: parts), target)
        self.seen, self.target = seen, target

    def _parts(self) -> list[nn.Module]:
        """All modules inside the layer. Its own hooks run where it is called."""
        return [part for part in self.layer.modules() if part is not self.layer]

    @staticmethod
    def _hooks(parts: Iterable[nn.Module]) -> list[Any]:
        return [hook for part in parts for kind in KINDS for hook in getattr(part, kind).values()]

    def before(self, module: nn.Module, args: Any) -> None:
        if self._hooks(self._parts()) != self.seen:
            self.look()
        for hook in self.target._forward_pre_hooks.values():
            hook(module, args)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        for hook in self.target._forward_hooks.values():
            hook(module, args, output)


def _looking_at_each_forward(original: Function) -> Function:
    @functools.wraps(original)
    def _register_hooks_on_fused_impl(self: Any, fused_impl: Any) -> None:
        emulated = _Emulated(self, original)
        fused_impl.register_forward_pre_hook(emulated.before)
        fused_impl.register_forward_hook(emulated.after)

    return _register_hooks_on_fused_impl


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return dict.fromkeys([MLP] if variant == "v0_15" else [MLP, RESIDUAL_RMSNORM], _looking_at_each_forward)
