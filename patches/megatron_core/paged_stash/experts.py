"""The stashes of a process's experts: settings, sizes, and whether a forward can gain."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shim._errors import OptionError
from shim._locks import renew_in_children
from shim.ops._stash_pool import PagePool, capturing
from shim.ops.paged_stash import (
    OVERFLOW,
    PagedStash,
    StashGroup,
    StashOverflowError,
    StashStatistics,
    weights_of,
)

__all__ = ["ExpertStash", "Settings", "cannot_gain", "check_settings", "total_of"]

FLAG = "moe_paged_stash"
HOST_FACTOR = "moe_paged_stash_buffer_size_factor_cpu"
SIZES = "moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda", HOST_FACTOR
COMPILED = "squared_relu", "quick_gelu", "fast_gelu"  # elementwise, with a finite backward at zero
EXACT = "the experts' buffers have no spare rows (no moe_pad_expert_input_to_capacity), and there is no host pool"
RANKED = (
    "rows that moe_expert_rank_capacity_factor adds are known to the fused operations only, and there is no host pool"
)
WIRE = "moe_dispatch_fwd_dtype"


class Settings(NamedTuple):
    """The sizes that a config and options ask for.

    Factors are upstream's: a positive factor multiplies the expected rows, a negative one the maximum so far.
    """

    page_size: int
    factor: float
    host_factor: float


class ExpertStash:
    """Makes groups of a PagedStash, and sizes its pools while they are empty.

    The first forward passes find pools without pages. So all originals are kept, and the needed pages are counted. The
    stash learns nothing else: it expects and records no order of passes.

    There is one stash for each set of settings. The experts of one model usually share a stash. Models with different
    settings do not affect each other.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options["overflow"] not in OVERFLOW:
            raise OptionError(f"option overflow is {options['overflow']!r}; it must be one of {', '.join(OVERFLOW)}")
        self.options = options
        self.enabled = True  # set by upstream's reset; False while evaluating
        self.rerunning = False
        self.runners = 0
        self.random_state: Callable[[], None] | None = None
        self._settings: Settings | None = None
        self._stashes: dict[Settings, PagedStash] = {}
        # Module -> settings, and settings of callers without a module. A stash whose settings are unused is dropped.
        self._settings_of: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
        self._of_unknown: set[Settings] = set()
        self._dropped = StashStatistics(0, 0, 0, 0)
        self._spilled_before: dict[Settings, Tensor] = {}
        self._current = threading.local()
        self._lock = threading.Lock()
        renew_in_children(self, "_lock", threading.Lock)

    # One forward

    def settings(self, config: Any) -> Settings:
        """The settings from the config, else from the options. A field with its default value counts as not set."""
        found: list[Any] = []
        for name in SIZES:
            value = getattr(config, name, None)
            is_default = value is None or value == getattr(type(config), name, None)
            found.append(self.options[name] if is_default else value)
        return Settings(*found)

    def asked(self, config: Any) -> bool:
        return bool(getattr(config, FLAG, False) or self.options[FLAG])

    def wanted(self, config: Any) -> bool:
        """Whether to stash a forward under this config. Cheap, because all experts ask."""
        return self.asked(config) and self.usable() and torch.is_grad_enabled()

    def usable(self) -> bool:
        return self.enabled and not self.rerunning and not torch.compiler.is_compiling()

    def group(
        self,
        module: Any,
        settings: Settings,
        rows: int,
        valid: Tensor | None,
        expected: int,
        inputs: Iterable[Tensor],
        weights: Iterable[Tensor],
        block_of: Callable[[Tensor], int | None] | None = None,
    ) -> StashGroup:
        stash = self._stash_of(module, settings)
        self._size(stash, settings)
        return stash.group(
            rows,
            valid,
            expected=expected,
            inputs=inputs,
            weights=weights,
            block_of=block_of,
            compiled=() if module is None else _compiled_activation(module.config),
        )

    def skip(self, module: Any, reason: str) -> None:
        """Count a forward of experts that is left alone."""
        self._stash_of(module, self.settings(module.config)).skip(reason)

    def run(self, forward: Callable[[], Any], module: Any, hidden: Tensor, probs: Tensor) -> Any:
        """Call forward() of the experts in `module`, for rows `hidden` [rows, h] with the router's `probs` [rows].

        A row that the dispatcher added to fill the capacity has a probability of zero. So it takes no part in the
        gradients of parameters and of routed tokens.
        """
        config, rows = module.config, hidden.shape[0]
        settings = self.settings(config)
        reason = cannot_gain(config, settings)
        if not reason and (probs.numel() != rows or hidden.dim() != 2):
            reason = f"probabilities {tuple(probs.shape)} are not those of rows {tuple(hidden.shape)}"
        if reason:
            self._stash_of(module, settings).skip(reason)
            return forward()
        padded = config.moe_pad_expert_input_to_capacity
        valid = probs.detach().reshape(rows) != 0 if padded else None
        expected = int(rows // max(config.moe_expert_capacity_factor, 1.0)) if padded else rows
        with self.group(module, settings, rows, valid, expected, (hidden, probs), weights_of(module)) as group:
            output = forward()
        group.commit(output)
        return output

    # Upstream's three calls around the fused experts

    def enter_module(self, module: Any) -> Any:
        """Note the module whose forward this thread is in. Returns the outer module, for `leave_module`."""
        outer, self._current.module = getattr(self._current, "module", None), module
        return outer

    def leave_module(self, outer: Any) -> None:
        self._current.module, self._current.inputs, self._current.group = outer, (), None

    def begin(self, tensor: Tensor) -> None:
        """Note the input of the experts."""
        self._current.inputs = (tensor,)

    def open(self, rows: int, count: Tensor, expected: int | None) -> contextlib.AbstractContextManager[Any]:
        if not self.usable():
            return contextlib.nullcontext()
        module = getattr(self._current, "module", None)
        settings = self.settings(module.config) if module is not None else self._settings or self.settings(None)
        weights = () if module is None else weights_of(module)
        # What comes quantized from other ranks has its scales behind all rows, so it does not count as rows of values.
        quantized = module is not None and getattr(module.config, WIRE, "bf16") != "bf16"
        inputs = () if quantized else getattr(self._current, "inputs", ())
        expected = rows if expected is None else expected
        group = self.group(module, settings, rows, count, expected, inputs, weights, _marked)
        self._current.group = group
        return group

    def commit(self, output: Tensor) -> None:
        group, self._current.group, self._current.inputs = getattr(self._current, "group", None), None, ()
        if group is not None:
            group.commit(output)

    # Steps

    def step_begins(self, enabled: bool, config: Any) -> None:
        self.enabled = enabled
        if config is not None:
            self._settings = self.settings(config)
        if enabled:
            self._drop_unused()
            for stash in self._all():
                stash.settle()
                stash.warn_if_idle()
            spilled = [(key, stash.spilled()) for key, stash in list(self._stashes.items())]
            self._spilled_before = {key: count for key, count in spilled if count is not None}

    def step_ends(self) -> None:
        """Called before gradients are used. Raises if tensors were lost, unless a runner repeats the step."""
        if self.runners or capturing():
            return
        lost = []
        for stash in self._all():
            try:
                stash.check() if stash.may_lose else stash.warn_if_idle()
            except StashOverflowError as error:  # collect from all stashes, because each check resets the count
                lost.append(error)
        self._drop_unused()
        if lost:
            raise lost[0] if len(lost) == 1 else StashOverflowError(" ".join(map(str, lost)))

    def overflowed(self) -> Tensor:
        """bool [1], on the device: whether tensors were lost since the last check."""
        return self._any(stash.lost() for stash in self._all())

    def spilled(self) -> Tensor:
        """bool [1], on the device: whether tensors went to the host in this step."""
        counts = []
        for key, stash in list(self._stashes.items()):
            count, before = stash.spilled(), self._spilled_before.get(key)
            counts.append(count if count is None or before is None else count - before)
        return self._any(counts)

    def _any(self, counts: Iterable[Tensor | None]) -> Tensor:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        flag = torch.zeros(1, dtype=torch.bool, device=device)
        for count in counts:
            if count is not None:
                flag |= (count != 0).to(device)
        return flag

    def forget_overflow(self) -> None:
        for stash in self._all():
            stash.forget_lost()

    def release(self) -> None:
        """Drop all empty pools, also those of CUDA graphs, which must not be replayed again."""
        for stash in self._all():
            stash.clear()
        self._spilled_before = {}

    def held(self) -> str:
        """The memory of all pools with pages, in words; "" if there is none."""
        pools = [pool for stash in self._all() for pool in list(stash.pools.values()) if pool.pages or pool.host_pages]
        if not pools:
            return ""
        device, host = sum(pool.nbytes for pool in pools), sum(pool.host_nbytes for pool in pools)
        return f"{len(pools)} pools of pages ({device} bytes on the device, {host} bytes on the host)"

    def statistics(self) -> StashStatistics:
        return total_of([self._dropped, *(stash.statistics() for stash in self._all())])

    # Stashes and their sizes

    def _all(self) -> list[PagedStash]:
        return list(self._stashes.values())  # another thread may add one meanwhile

    def _stash_of(self, module: Any, settings: Settings) -> PagedStash:
        stash = self._stashes.get(settings)
        known = settings in self._of_unknown if module is None else self._settings_of.get(module) == settings
        if stash is not None and known:
            return stash
        check_settings(self.options, settings)
        with self._lock:
            if module is None:
                self._of_unknown.add(settings)
            else:
                self._settings_of[module] = settings
            if settings not in self._stashes:
                # A stash gets its host pool only with its sizes. Until then "spill" is not possible, so it is "raise".
                policy = "raise" if self.options["overflow"] == "spill" else str(self.options["overflow"])
                self._stashes[settings] = PagedStash(page_size=settings.page_size, overflow=policy)
            stash = self._stashes[settings]
        self._drop_unused()
        return stash

    def _drop_unused(self) -> None:
        """Drop stashes, with their memory, whose experts are gone or have other settings now.

        A stash stays if it is not empty, if a CUDA graph uses it, or if it has an unreported loss.
        """
        if capturing():
            return
        with self._lock:
            used = {*self._settings_of.values(), *self._of_unknown}
            for settings in self._stashes.keys() - used:
                stash = self._stashes[settings]
                if stash.live or any(pool.captured for pool in stash.pools.values()):
                    continue
                counted = stash.statistics()
                lost = stash.lost()
                if lost is not None and lost.any():
                    continue
                del self._stashes[settings]
                self._dropped = total_of([self._dropped, replace(counted, pools=())])

    def _size(self, stash: PagedStash, settings: Settings) -> None:
        if not stash.live:
            stash.warn_if_idle()
        if not capturing():
            stash.resize(lambda pool: _pages(pool, settings))


def total_of(counted: Iterable[StashStatistics]) -> StashStatistics:
    """The sum of these statistics."""
    found = list(counted)
    skipped: Counter[str] = Counter()
    for one in found:
        skipped.update(one.skipped)
    return StashStatistics(
        stashed=sum(one.stashed for one in found),
        spilled=sum(one.spilled for one in found),
        kept=sum(one.kept for one in found),
        lost=sum(one.lost for one in found),
        skipped=dict(skipped),
        pools=tuple(pool for one in found for pool in one.pools),
    )


def _pages(pool: PagePool, settings: Settings) -> tuple[int, int]:
    """The pages that a pool should have on the device and on the host."""
    pages, host_pages = (
        math.ceil(abs(factor) * (pool.most_expected if factor >= 0 else pool.most_wanted()))
        for factor in (settings.factor, settings.host_factor)
    )
    return min(pages, pool.most_full), min(host_pages, pool.most_full)  # more can never be used


def check_settings(options: Mapping[str, Any], settings: Settings) -> None:
    """Raise OptionError for impossible settings. Not checked by apply(), because only a model has a config."""

    def refuse(what: str, remedy: str) -> None:
        raise OptionError(f"paged-stash: {what}. Remedy: {remedy}, in the model's config or by the option of that name")

    size = settings.page_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        refuse(f"{SIZES[0]} is {size!r}", "set it to a whole number of rows, at least 1")
    for name, factor in zip(SIZES[1:], settings[1:], strict=True):
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            refuse(f"{name} is {factor!r}", "set it to a finite number")
    if options["overflow"] == "spill" and not settings.host_factor:
        refuse("overflow='spill' needs a host pool, and there is none", f"set {HOST_FACTOR} to other than 0")
    if settings.host_factor and torch.cuda.is_available() and find_spec("triton") is None:
        refuse("a GPU reads its host pool by Triton, which is not installed", f"install it, or set {HOST_FACTOR} to 0")


def cannot_gain(config: Any, settings: Settings) -> str:
    """Why experts with this config gain nothing from a stash; "" if they may gain."""
    padded = getattr(config, "moe_pad_expert_input_to_capacity", False)
    offloaded = {"expert_fc1", "moe_act"} & set(getattr(config, "offload_modules", None) or ())
    if offloaded and getattr(config, "fine_grained_activation_offloading", False):
        return f"offload_modules has {', '.join(sorted(offloaded))}, which are the experts' own"
    if padded and getattr(config, "moe_apply_probs_on_input", False):
        return "with moe_apply_probs_on_input, rows that fill the capacity have a part in gradients"
    if settings.host_factor:
        return ""
    if not padded:
        return EXACT if getattr(config, "moe_expert_rank_capacity_factor", None) is None else RANKED
    if config.moe_expert_capacity_factor <= 1.0:
        return f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} leaves no rows to spare"
    return ""


def _compiled_activation(config: Any) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The activation, if upstream has compiled it with torch.compile."""
    upstream, found = sys.modules.get("megatron.core.activations"), getattr(config, "activation_func", None)
    return () if found is None or all(found is not getattr(upstream, name, None) for name in COMPILED) else (found,)


def _marked(tensor: Tensor) -> int | None:
    """The rows per row of a tensor, by Transformer Engine's mark: False for rows, True for scales of 32 rows."""
    mark = getattr(tensor, "grouped_tensor_scale_inv", None)
    return None if mark is None else 32 if mark else 1
