"""The stash of a process's experts: its settings, its sizes, and what each forward may gain."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shim._errors import OptionError
from shim.ops._stash_pool import PagePool, capturing
from shim.ops.paged_stash import OVERFLOW, PagedStash, StashGroup, StashStatistics, weights_of

__all__ = ["ExpertStash", "Settings"]

FLAG = "moe_paged_stash"
HOST_FACTOR = "moe_paged_stash_buffer_size_factor_cpu"
SIZES = "moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda", HOST_FACTOR
EXACT = "the experts' buffers have no spare rows (no moe_pad_expert_input_to_capacity), and there is no host pool"


class Settings(NamedTuple):
    """The sizes that a config, and options where it has no such field, ask for. Factors are upstream's: a positive one
    is of the rows to be expected, a negative one of the most that there were."""

    page_size: int
    factor: float
    host_factor: float


class ExpertStash:
    """Makes groups of one PagedStash, and sizes its pools in moments in which nothing is in them.

    The first forward passes find pools without pages, so that all originals are kept, and what they would have needed
    is counted. That is the only thing learnt: no order of passes is expected or recorded.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options["overflow"] not in OVERFLOW:
            raise OptionError(f"option overflow is {options['overflow']!r}; it must be one of {', '.join(OVERFLOW)}")
        self.options = options
        self.enabled = True  # by upstream's reset: not while evaluating
        self.rerunning = False
        self.runners = 0
        self.random_state: Callable[[], None] | None = None
        self._settings: Settings | None = None
        self._sized_by: Settings | None = None
        self._stash: PagedStash | None = None
        self._spilled_before: Tensor | None = None
        self._current = threading.local()
        self._lock = threading.Lock()

    # One forward

    def settings(self, config: Any) -> Settings:
        return Settings(*(getattr(config, name, self.options[name]) for name in SIZES))

    def asked(self, config: Any) -> bool:
        return bool(getattr(config, FLAG, False) or self.options[FLAG])

    def wanted(self, config: Any) -> bool:
        """Whether a forward under this config is to be stashed: cheap, since all experts ask."""
        return self.asked(config) and self.usable() and torch.is_grad_enabled()

    def usable(self) -> bool:
        return self.enabled and not self.rerunning and not torch.compiler.is_compiling()

    def group(
        self,
        settings: Settings,
        rows: int,
        valid: Tensor | None,
        expected: int,
        inputs: Iterable[Tensor],
        weights: Iterable[Tensor],
        block_of: Callable[[Tensor], int | None] | None = None,
    ) -> StashGroup:
        stash = self._get(settings)
        if not stash.live:
            self._size(stash, settings)
        return stash.group(rows, valid, expected=expected, inputs=inputs, weights=weights, block_of=block_of)

    def run(self, forward: Callable[[], Any], module: Any, hidden: Tensor, probs: Tensor) -> Any:
        """forward() of experts in `module`, for rows `hidden` [rows, h] with the router's `probs` [rows].

        A row that the dispatcher put in to fill the capacity has a probability of zero, and therefore no part in any
        gradient of a parameter or of what was routed.
        """
        config, rows = module.config, hidden.shape[0]
        settings = self.settings(config)
        reason = _cannot_gain(config, settings)
        if not reason and (probs.numel() != rows or hidden.dim() != 2):
            reason = f"probabilities {tuple(probs.shape)} are not those of rows {tuple(hidden.shape)}"
        if reason:
            (self._stash or self._get(settings)).skip(reason)
            return forward()
        padded = config.moe_pad_expert_input_to_capacity
        valid = probs.detach().reshape(rows) != 0 if padded else None
        expected = int(rows // max(config.moe_expert_capacity_factor, 1.0)) if padded else rows
        with self.group(settings, rows, valid, expected, (hidden, probs), weights_of(module)) as group:
            output = forward()
        group.commit(output)
        return output

    # Upstream's three calls around the fused experts

    def enter_module(self, module: Any) -> Any:
        """Note whose forward this thread is in; returns what it was in before, for `leave_module`."""
        outer, self._current.module = getattr(self._current, "module", None), module
        return outer

    def leave_module(self, outer: Any) -> None:
        self._current.module, self._current.inputs, self._current.group = outer, (), None

    def begin(self, tensor: Tensor) -> None:
        """Note what goes into the experts."""
        self._current.inputs = (tensor,)

    def open(self, rows: int, count: Tensor, expected: int | None) -> contextlib.AbstractContextManager[Any]:
        if not self.usable():
            return contextlib.nullcontext()
        module = getattr(self._current, "module", None)
        settings = self.settings(module.config) if module is not None else self._settings or self.settings(None)
        weights = () if module is None else weights_of(module)
        inputs = getattr(self._current, "inputs", ())
        group = self.group(settings, rows, count, rows if expected is None else expected, inputs, weights, _marked)
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
        stash = self._stash
        if stash is not None and enabled:
            stash.settle()
            stash.warn_if_idle()
            self._spilled_before = stash.spilled()

    def step_ends(self) -> None:
        """Before gradients are used: an error where tensors were lost, unless a runner is there to repeat the step."""
        stash = self._stash
        if stash is None or self.runners or capturing():
            return
        if stash.may_lose:
            stash.check()
        else:
            stash.warn_if_idle()

    def overflowed(self) -> Tensor:
        """bool [1], on the device: whether tensors were lost since the last check."""
        return self._flag(None if self._stash is None else self._stash.lost())

    def spilled(self) -> Tensor:
        """bool [1], on the device: whether something went to the host in this step."""
        spilled, before = None if self._stash is None else self._stash.spilled(), self._spilled_before
        return self._flag(spilled if spilled is None or before is None else spilled - before)

    def _flag(self, count: Tensor | None) -> Tensor:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.zeros(1, dtype=torch.bool, device=device) if count is None else (count != 0).to(device)

    def forget_overflow(self) -> None:
        if self._stash is not None:
            self._stash.forget_lost()

    def release(self) -> None:
        """Drop all pools, with the graphs that use them."""
        if self._stash is not None:
            self._stash.clear()
            self._spilled_before = None

    def statistics(self) -> StashStatistics:
        return StashStatistics(0, 0, 0, 0) if self._stash is None else self._stash.statistics()

    # Sizes

    def _get(self, settings: Settings) -> PagedStash:
        stash = self._stash
        # Layers may differ in their configs. They share a stash, and the first one of a step decides about its pages.
        if stash is None or (stash.page_size != settings.page_size and not stash.live):
            with self._lock:
                self._stash = stash = PagedStash(page_size=settings.page_size, overflow=_policy(self.options, settings))
        return stash

    def _size(self, stash: PagedStash, settings: Settings) -> None:
        stash.warn_if_idle()
        if capturing():
            return
        if settings != self._sized_by:
            self._sized_by = settings
            stash.resize_all()
        stash.resize(lambda pool: _pages(pool, settings))


def _pages(pool: PagePool, settings: Settings) -> tuple[int, int]:
    """How many pages a pool is to have, and how many on the host."""
    pages, host_pages = (
        math.ceil(abs(factor) * (pool.most_expected if factor >= 0 else pool.most_wanted()))
        for factor in (settings.factor, settings.host_factor)
    )
    return min(pages, pool.most_full), min(host_pages, pool.most_full)  # more could not be taken


def _policy(options: Mapping[str, Any], settings: Settings) -> str:
    """The stash's own: it learns of its host pool when it gets its sizes, so that "spill" is "raise" to it."""
    overflow = str(options["overflow"])
    if overflow == "spill" and not settings.host_factor:
        raise OptionError(f"paged-stash: overflow='spill' needs a host pool: set {HOST_FACTOR} to other than 0")
    return "raise" if overflow == "spill" else overflow


def _cannot_gain(config: Any, settings: Settings) -> str:
    """Why there is nothing to gain for experts whose buffers have no rows to spare, as far as the config tells."""
    padded = getattr(config, "moe_pad_expert_input_to_capacity", False)
    offloaded = {"expert_fc1", "moe_act"} & set(getattr(config, "offload_modules", None) or ())
    if offloaded and getattr(config, "fine_grained_activation_offloading", False):
        return f"offload_modules has {', '.join(sorted(offloaded))}, which are the experts' own"
    if padded and getattr(config, "moe_apply_probs_on_input", False):
        return "with moe_apply_probs_on_input, rows that fill the capacity have a part in gradients"
    if settings.host_factor:
        return ""
    if not padded:
        return EXACT
    if config.moe_expert_capacity_factor <= 1.0:
        return f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} leaves no rows to spare"
    return ""


def _marked(tensor: Tensor) -> int | None:
    """Transformer Engine's mark on what it saves: False for rows of tokens, True for scales of blocks of 32 of them."""
    mark = getattr(tensor, "grouped_tensor_scale_inv", None)
    return None if mark is None else 32 if mark else 1
