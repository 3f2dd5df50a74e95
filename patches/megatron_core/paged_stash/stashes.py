"""One PagedStash for each set of sizes, with the pools of all of them.

ExpertStash (`experts`) gives it the forward passes of experts. The stashes themselves are shim.ops.PagedStash.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shim import ops  # which imports the stash at its first use: most runs have none
from shim._threads import renew_in_children
from shim.ops._checks import capturing
from shim.patches.megatron_core.paged_stash.settings import FLAG, SIZES, Settings, check_settings

if TYPE_CHECKING:
    from shim.ops._stash_group import StashGroup
    from shim.ops._stash_pool import PagePool

COMPILED = "squared_relu", "quick_gelu", "fast_gelu"  # elementwise, with a finite backward at zero


class Stashes:
    """Makes groups of a PagedStash, and sizes its pools while they are empty.

    The first forward passes find pools without pages. So all originals are kept, and the needed pages are counted. The
    stash learns nothing else: it expects and records no order of passes.

    There is one stash for each set of settings. The experts of one model usually share a stash. Models with different
    settings do not affect each other.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self._stashes: dict[Settings, ops.PagedStash] = {}
        # Module -> settings, and settings of callers without a module. A stash whose settings are unused is dropped.
        self._settings_of: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
        self._of_unknown: set[Settings] = set()
        self._dropped: ops.StashStatistics | None = None
        self._spilled_before: dict[Settings, Tensor] = {}
        self._lock = threading.Lock()
        renew_in_children(self, "_lock", threading.Lock)

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

    # Stashes and their sizes

    def _all(self) -> list[ops.PagedStash]:
        return list(self._stashes.values())  # another thread may add one meanwhile

    def _stash_of(self, module: Any, settings: Settings) -> ops.PagedStash:
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
                self._stashes[settings] = ops.PagedStash(page_size=settings.page_size, overflow=policy)
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

    def _size(self, stash: ops.PagedStash, settings: Settings) -> None:
        if not stash.live:
            stash.warn_if_idle()
        if not capturing():
            stash.resize(lambda pool: _pages(pool, settings))

    # All of them at once

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

    def note_spilled(self) -> None:
        """From now on `spilled` tells what goes to the host after this moment."""
        counts = [(key, stash.spilled()) for key, stash in list(self._stashes.items())]
        self._spilled_before = {key: count for key, count in counts if count is not None}

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

    def statistics(self) -> ops.StashStatistics:
        return total_of([self._dropped, *(stash.statistics() for stash in self._all())])


def total_of(counted: Iterable[ops.StashStatistics | None]) -> ops.StashStatistics:
    """The sum of these statistics, without those that are None."""
    found = [one for one in counted if one is not None]
    skipped: Counter[str] = Counter()
    for one in found:
        skipped.update(one.skipped)
    return ops.StashStatistics(
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


def _compiled_activation(config: Any) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The activation, if upstream has compiled it with torch.compile."""
    upstream, found = sys.modules.get("megatron.core.activations"), getattr(config, "activation_func", None)
    return () if found is None or all(found is not getattr(upstream, name, None) for name in COMPILED) else (found,)
