"""Valid rows of saved activations in pages, between forward and backward.

Under CUDA graphs, or with a fixed capacity, experts compute in buffers that are larger than their contents. After the
forward pass of the experts, the stash copies the rows that hold tokens into pages of a preallocated buffer. For their
backward it copies the rows back. In between the large buffers are free. Pages come from a ring on the device, so the
host never waits.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shim._errors import ShimError
from shim._threads import renew_in_children
from shim.ops._checks import capturing
from shim.ops._stash_compiled import CompiledRegions
from shim.ops._stash_group import StashGroup, tensors_in
from shim.ops._stash_layout import KEPT, LOST, MOST_WANTED, OVERFLOW, SPILLED, STASHED, WANTED
from shim.ops._stash_pool import PagePool, backend_for
from shim.ops._stashed_tensor import StashedTensor

__all__ = ["OVERFLOW", "PagedStash", "PoolUse", "StashOverflowError", "StashStatistics", "weights_of"]

log = logging.getLogger("shim")

# The most forward passes whose originals may wait for the device to report the place of their copies.
AHEAD = 2
# A pool's memory is freed if the stash has been empty this many times since the pool's last use.
UNUSED = 100


class StashOverflowError(ShimError):
    """Saved tensors were lost: the pool had no pages left. The gradients since the last check are wrong."""


@dataclass(frozen=True)
class PoolUse:
    """One pool: its size, the pages wanted now and the most ever wanted, in pages, and its memory in bytes."""

    dtype: torch.dtype
    width: int
    page_size: int
    pages: int
    host_pages: int
    wanted: int
    most_wanted: int
    nbytes: int
    host_nbytes: int


@dataclass(frozen=True)
class StashStatistics:
    """Counts of saved tensors by outcome. A pool's `wanted` counts the pages for all its tensors, wherever they are."""

    stashed: int
    spilled: int
    kept: int
    lost: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    pools: tuple[PoolUse, ...] = ()


class PagedStash:
    """Keeps the valid rows of saved tensors [rows, ...] in pages.

    pages, host_pages: the size of each pool, in pages of `page_size` rows. There is one pool for each device, dtype and
    row width. The host part is pinned memory and takes tensors that no longer fit on the device. `resize` sets the size
    of each pool.

    overflow: the action for a tensor that finds no pages, in the pool or on the host:
        "keep": the original stays in memory. The host learns of it without waiting and holds all originals until then,
            but only for the last few forward passes: a host that is further ahead waits for the device.
        "raise", and "spill" with a host pool: the tensor is lost, and `check` raises.
    While a CUDA graph is captured the host cannot decide, so "keep" acts like "raise".

    backend: "eager" or "triton". The default is "triton" on a GPU if Triton is installed.

    Gradients are equal, bit for bit, if invalid rows take no part in them. Invalid rows are restored as zeros, so a
    custom function must not divide by them. Pages are free as soon as autograd drops a tensor: after its backward, with
    the graph, or after an exception. The order does not matter.

    ValueError for impossible sizes and policies.
    """

    def __init__(
        self,
        pages: int = 0,
        *,
        page_size: int = 64,
        host_pages: int = 0,
        overflow: str = "keep",
        backend: str | None = None,
    ) -> None:
        for name, size, least in (("page_size", page_size, 1), ("pages", pages, 0), ("host_pages", host_pages, 0)):
            if size < least:
                raise ValueError(f"{name} is {size}; it must be at least {least}")
        if backend not in (None, "eager", "triton"):
            raise ValueError(f"backend is {backend!r}; it must be 'eager' or 'triton'")
        if overflow not in OVERFLOW:
            raise ValueError(f"overflow is {overflow!r}; it must be one of {', '.join(OVERFLOW)}")
        if overflow == "spill" and host_pages == 0:
            raise ValueError("overflow='spill' needs host_pages")
        self.pages, self.host_pages, self.page_size = pages, host_pages, page_size
        self.overflow, self.backend = overflow, backend
        self.pools: dict[tuple[torch.device, torch.dtype, int], PagePool] = {}
        self.skipped: Counter[str] = Counter()
        self._offered = 0
        self._told: set[str] = set()
        self._lock = threading.Lock()
        renew_in_children(self, "_lock", threading.Lock)
        self._unsettled: list[_Unsettled] = []
        self._rounds = 0
        self._offered_before = 0

    def __reduce__(self) -> tuple[Callable[..., PagedStash], tuple[Any, ...]]:
        """A copy, also by pickle, is a new and empty stash with the same settings."""
        sizes = {"pages": self.pages, "host_pages": self.host_pages, "page_size": self.page_size}
        return functools.partial(type(self), **sizes, overflow=self.overflow, backend=self.backend), ()

    # Stashing

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        rows: int,
        valid: Tensor | int | None = None,
        expected: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call function(*args, **kwargs) and stash the tensors it saves for backward. For other arguments see `group`.

        An argument with `rows` rows counts as rows, unless it is a parameter or in a dict, as
        torch.func.functional_call passes weights. Tensors made from other arguments have no rows and are left alone.
        """
        weights = weights_of(function) if isinstance(function, torch.nn.Module) else ()
        inputs = tuple(tensors_in((args, tuple(kwargs.values())), mappings=False))
        others = tuple(tensors_in((args, kwargs)))
        with self.group(
            rows, valid, expected=expected, inputs=inputs, weights=(*weights, *_except(others, inputs))
        ) as group:
            output = function(*args, **kwargs)
        group.commit(output)
        return output

    def group(
        self,
        rows: int,
        valid: Tensor | int | None = None,
        *,
        expected: int | None = None,
        inputs: Iterable[Tensor] = (),
        weights: Iterable[Tensor] = (),
        block_of: Callable[[Tensor], int | None] | None = None,
        compiled: Iterable[Callable[[Tensor], Tensor]] = (),
    ) -> StashGroup:
        """A context for one forward. Its `commit` stashes the tensors saved inside.

        The stash takes the valid rows of tensors saved by operators that keep rows in place, if every path to an output
        does so; see docs/paged-stash-operators.md. It also takes inputs and outputs of custom functions
        (torch.autograd.Function) if they come from `inputs`. Custom functions are trusted to keep rows in place and to
        work on zeros. Only `block_of` identifies tensors that such a function makes itself. Every other tensor is left
        alone, and counted.

        valid: None for all rows; an int, or an integer tensor of one element, for the first rows; an integer tensor
        [segments] for the first rows of each of that many equal segments; a bool tensor [rows] for any rows. Rows are
        those of the outputs, whose first dimensions multiply to `rows`. Invalid rows must get no gradient on any path.
        expected: how many rows are probably valid, for pool sizes (`resize`); by default all.
        inputs: the inputs of the forward, at which the search stops. Those with `rows` rows that are no parameters are
        rows. Without inputs, custom functions are left alone, and earlier nodes of another thread might pass for nodes
        of this forward, because autograd numbers the nodes of each thread separately.
        weights: tensors that stay.
        block_of: returns how many rows each row of a tensor stands for, whatever its shape (1: the tensor has all rows;
        32: it has scales of blocks of 32 rows); None for an unknown tensor.
        compiled: functions of one tensor, compiled by torch.compile, that work elementwise, such as activations. Their
        backward must work on zeros. All other compiled regions are left alone.
        """
        expected = rows if expected is None else expected
        regions = CompiledRegions(tuple(compiled))
        return StashGroup(self, rows, valid, expected, tuple(inputs), tuple(weights), block_of, regions)

    def skip(self, reason: str) -> None:
        """Count a saved tensor, or a whole forward, that is not stashed."""
        self.skipped[reason] += 1

    def pool_for(self, tensor: Tensor, width: int) -> PagePool:
        key = (tensor.device, tensor.dtype, width)
        with self._lock:
            pool = self.pools.get(key)
            if pool is None or pool.size_before is not None:
                if tensor.device.type == "cuda" and capturing():
                    raise RuntimeError(
                        f"the paged stash has no pool for {tensor.dtype} with rows of {width} yet, and can make none "
                        "while a CUDA graph is captured: run the same step once before"
                    )
                if pool is None:
                    backend = backend_for(self.backend, tensor.device)
                    sizes = self.page_size, self.pages, self.host_pages
                    pool = self.pools[key] = PagePool(tensor.dtype, width, *sizes, tensor.device, backend)
                pool.take_up()
            pool.last_used = self._rounds
            return pool

    def begin_forward(self) -> None:
        """Count how often the stash was empty, and free pools that were long unused.

        The stash is empty between two steps. A captured pool stays, because replays of a graph are not visible here.
        """
        if self._offered == self._offered_before or self.live or capturing():
            return
        self._offered_before = self._offered
        with self._lock:
            self._rounds += 1
            unused = [pool for pool in self.pools.values() if self._rounds - pool.last_used > UNUSED]
            for pool in unused:
                pool.give_up()

    def _all_pools(self) -> list[PagePool]:
        return list(self.pools.values())  # another thread may add one meanwhile

    def count_offered(self, tensors: int) -> None:
        self._offered += tensors

    # Originals, kept until the host knows that their copies are in pages

    def await_flags(self, records: list[weakref.ref[StashedTensor]], flags: Tensor) -> None:
        """Drop the originals of `records` once the host sees that they are in pages. flags: [n], `where` of each."""
        self._unsettled.append(_Unsettled(records, flags))
        self.settle()

    def settle(self) -> None:
        """Drop originals whose copies are known to be in pages.

        Waits only if the host is more than AHEAD forward passes ahead of the device. More originals would need more
        memory than no stash, and the device has enough work meanwhile.
        """
        if capturing():
            return  # a capture forbids event queries
        with self._lock:
            done = []
            while self._unsettled and (len(self._unsettled) > AHEAD or self._unsettled[0].is_known()):
                done.append(self._unsettled.pop(0))
        for unsettled in done:
            unsettled.settle()

    # Between steps

    @property
    def live(self) -> int:
        """How many saved tensors are in the stash now."""
        return sum(pool.live for pool in self._all_pools())

    def resize(self, sizes: Callable[[PagePool], tuple[int, int]]) -> None:
        """Give each pool the sizes (pages, host pages) that `sizes` returns for it. `sizes` may use of the pool:

        most_expected: the most pages that were expected at once; most_full: the most pages if all rows were valid;
        most_wanted(): the most pages that were wanted, for which the host waits for the device.

        `sizes` is called for a pool only if the pool is empty, no CUDA graph uses it, and since its last size it had a
        new maximum of expected pages or an overflow.
        """
        for pool in self._all_pools():
            if pool.live or pool.captured or not pool.outgrown or pool.size_before is not None:
                continue
            wanted = sizes(pool)
            pool.outgrown = False
            if wanted != (pool.pages, pool.host_pages):
                pool.allocate_pages(*wanted)

    def clear(self) -> None:
        """Free the memory of all empty pools, also of those that a CUDA graph uses: do not replay that graph again.

        The pools keep their maxima and can be resized. A pool that is not empty stays as it is.
        """
        for pool in self._all_pools():
            if pool.allocate_pages(0, 0):  # also forgets the size before
                pool.captured, pool.outgrown = False, True

    def resize_all(self) -> None:
        """Let the next `resize` consider every pool, because its rule has changed."""
        for pool in self._all_pools():
            pool.outgrown = True

    def check(self) -> None:
        """Raise StashOverflowError if tensors were lost since the last check. Call it before the optimizer step.

        Waits for the device once. Warns, once for each reason, if nothing was stashed.
        """
        lost = []
        for pool in self._all_pools():
            count = int(pool.current_state()[LOST])
            if count:
                pool.state[LOST].zero_()
                have = f"{pool.pages} pages and {pool.host_pages} on the host, wanted {pool.most_wanted()}"
                lost.append(f"{count} of {pool.dtype} with rows of {pool.width} (there are {have})")
        if lost:
            raise StashOverflowError(
                f"the paged stash lost {', '.join(lost)}: the gradients since the last check are wrong. Remedy: drop "
                "them and repeat the step with more pages, a host pool, or overflow='keep'."
            )
        self.warn_if_idle()

    @property
    def may_lose(self) -> bool:
        """Whether `check` can find lost tensors."""
        return self.overflow != "keep" or any(pool.captured for pool in self._all_pools())

    def lost(self) -> Tensor | None:
        """How many tensors were lost since the last check, int64 [1] on the device; None before there are pools."""
        return self._total(LOST)

    def spilled(self) -> Tensor | None:
        """How many tensors went to the host so far, int64 [1] on the device; None before there are pools."""
        return self._total(SPILLED)

    def _total(self, place: int) -> Tensor | None:
        counts = [pool.current_state()[place : place + 1] for pool in self._all_pools()]
        return torch.stack(counts).sum(0) if counts else None

    def forget_lost(self) -> None:
        """Reset the count of lost tensors, for a repeated step."""
        for pool in self._all_pools():
            pool.current_state()[LOST].zero_()

    def warn_if_idle(self) -> None:
        """Warn, once for each reason, if tensors were offered and none was stashed."""
        if self._offered or not self.skipped:
            return
        for reason in self.skipped.keys() - self._told:
            self._told.add(reason)
            log.warning("paged stash: nothing was stashed (%d times): %s", self.skipped[reason], reason)

    def statistics(self) -> StashStatistics:
        """The outcomes of all saved tensors so far. Waits for the device."""
        states = [(pool, pool.current_state().tolist()) for pool in self._all_pools()]
        uses = [
            PoolUse(
                pool.dtype,
                pool.width,
                pool.page_size,
                pool.pages,
                pool.host_pages,
                state[WANTED],
                state[MOST_WANTED],
                pool.nbytes,
                pool.host_nbytes,
            )
            for pool, state in states
        ]
        stashed, spilled, kept, lost = (
            sum(state[place] for _, state in states) for place in (STASHED, SPILLED, KEPT, LOST)
        )
        return StashStatistics(stashed, spilled, kept, lost, dict(self.skipped), tuple(uses))


def weights_of(module: torch.nn.Module) -> tuple[Tensor, ...]:
    """The parameters and buffers of a module, which outlive a forward."""
    return (*module.parameters(), *module.buffers())


def _except(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    known = {id(tensor) for tensor in others}
    return [tensor for tensor in tensors if id(tensor) not in known]


class _Unsettled:
    """The records of one forward, and a copy of their flags for the host."""

    def __init__(self, records: list[weakref.ref[StashedTensor]], flags: Tensor) -> None:
        self.records = records
        self._event: torch.cuda.Event | None = None
        if flags.device.type == "cuda":
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._flags = flags.clone()  # a release resets the flag

    def is_known(self) -> bool:
        return self._event is None or self._event.query()

    def settle(self) -> None:
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        for reference, where in zip(self.records, self._flags.tolist(), strict=True):
            record = reference()
            if record is not None:
                record.settle(where)
