"""The flag by which Transformer Engine knows of fine-grained activation offloading, and an argument of 0.17.

What is wrong:
- 0.16 to 0.20 set CPUOffloadEnabled when they enter a region and clear it when they leave, even if it was set before.
  An inner region, or a region inside another library's, ends the outer one early.
- 0.17 passes retain_pinned_cpu_buffers to Transformer Engine 2.5 to 2.9. The argument came with 2.10, so no GPTModel
  can be built.
- Transformer Engine 2.10 and later heeds the flag only if NVTE_CPU_OFFLOAD_V1=1 was set before its import. Without the
  variable Transformer Engine treats nothing as offloaded and marks no weight to stay (2.15; 0.19 heeds the mark). Then
  weights are offloaded as well, above all quantized weights.

The patch: a region restores the value it found, also after an exception. 0.17 drops the argument for TE releases that
lack it, as 0.18 does. With option set_variable, shim sets the variable just before Transformer Engine is imported.
shim.check(model) and `shim doctor` report a missing variable.

Upstream: 0.18 (the argument).

Delete when: PipelineOffloadManager restores the flag upstream, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function
from shim.patches._named import Named
from shim.patches.megatron_core.te_cpu_offload.variable import Variable

MANAGER = "megatron.core.pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager."
EXTENSIONS = "megatron.core.extensions.transformer_engine"
CONTEXT = EXTENSIONS + ":get_cpu_offload_context"


class _Regions(Named, threading.local):
    """The state before each entered region of this thread: the manager, TE's flag, and the manager's flag."""

    def __init__(self) -> None:
        self.entered: list[tuple[Any, Any, bool]] = []


_REGIONS = _Regions()
_VARIABLE = Variable()


def _offload_module() -> Any:
    """The module of Transformer Engine that has the flag, as megatron-core imported it."""
    return getattr(sys.modules[EXTENSIONS], "cpu_offload", None)


def _enter(original: Function) -> Function:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        te = _offload_module()
        found = (self, getattr(te, "CPUOffloadEnabled", None), getattr(self, "inside_context", False))
        try:
            result = original(self)
        except BaseException:
            _restore(found)
            raise
        _REGIONS.entered.append(found)
        return result

    return __enter__


def _exit(original: Function) -> Function:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any) -> Any:
        # A region entered before apply() has no entry here.
        found = _REGIONS.entered.pop() if _REGIONS.entered and _REGIONS.entered[-1][0] is self else None
        try:
            return original(self, *args)
        finally:
            if found is not None:
                _restore(found)

    return __exit__


def _restore(found: tuple[Any, Any, bool]) -> None:
    manager, flag, inside = found
    te = _offload_module()
    if te is not None and flag is not None:
        te.CPUOffloadEnabled = flag
    manager.inside_context = inside


def _context(original: Function) -> Function:
    upstream = vars(sys.modules[EXTENSIONS])
    inner = upstream.get("_get_cpu_offload_context")
    known = set() if inner is None else set(inspect.signature(inner).parameters)
    if inner is None or "double_buffering" not in known or "retain_pinned_cpu_buffers" in known:
        return original

    @functools.wraps(original)
    def get_cpu_offload_context(
        enabled: bool,
        num_layers: int,
        model_layers: int,
        activation_offloading: bool,
        weight_offloading: bool,
        double_buffering: bool,
        retain_pinned_cpu_buffers: bool,
    ) -> Any:
        return upstream["_get_cpu_offload_context"](
            enabled, num_layers, model_layers, activation_offloading, weight_offloading, double_buffering
        )

    return get_cpu_offload_context


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Pairs for shim.check(): why the flag has no effect on these models, and the remedy."""
    te = sys.modules.get("transformer_engine.pytorch.cpu_offload")
    if getattr(te, "NVTE_CPU_OFFLOAD_V1", True):  # before 2.10 the choice does not exist
        return
    asked = "shim.apply(options={'te-cpu-offload': {'set_variable': True}})"
    remedy = f"set NVTE_CPU_OFFLOAD_V1=1 for the process, or call {asked} before Transformer Engine is imported"
    configs = [getattr(module, "config", None) for model in models for module in model.modules()]
    if any(getattr(config, "fine_grained_activation_offloading", False) for config in configs):
        what = "fine_grained_activation_offloading is set, but Transformer Engine was imported without"
        yield f"{what} NVTE_CPU_OFFLOAD_V1=1 and treats nothing as offloaded: weights are offloaded too", remedy
    if any(getattr(c, "cpu_offloading", False) and getattr(c, "cpu_offloading_weights", False) for c in configs):
        what = "cpu_offloading_weights has no effect, because Transformer Engine was imported without"
        yield f"{what} NVTE_CPU_OFFLOAD_V1=1", remedy


def _told() -> str:
    return f"{len(_REGIONS.entered)} regions of this thread are entered" if _REGIONS.entered else ""


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    flag = {MANAGER + "__enter__": _enter, MANAGER + "__exit__": _exit}
    factories = {**flag, CONTEXT: _context} if variant == "v0_17" else flag
    # After revert() upstream's own function leaves the regions, and would not remove the entries.
    resources = [Resource(_told, lambda: _REGIONS.entered.clear())]
    return Bindings(factories, *resources, *([_VARIABLE.resource()] if options["set_variable"] else []))
