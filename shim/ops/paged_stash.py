"""Valid rows of saved activations in pages, between forward and backward.

Experts under CUDA graphs, or with a fixed capacity, compute in buffers that are larger than what they hold. After their
forward the rows that hold tokens are copied into pages of a buffer made beforehand, and back for their backward; in
between the large buffers are free. The pages come from a ring on the device, so that the host has to wait for nothing.
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
from shim.ops._stash_compiled import CompiledRegions
from shim.ops._stash_eager import KEPT, LOST, MOST_WANTED, SPILLED, STASHED, WANTED
from shim.ops._stash_group import StashGroup, tensors_in
from shim.ops._stash_pool import PagePool, backend_for, capturing
from shim.ops._stashed_tensor import StashedTensor

__all__ = ["OVERFLOW", "PagedStash", "PoolUse", "StashOverflowError", "StashStatistics", "weights_of"]

log = logging.getLogger("shim")

OVERFLOW = ("keep", "spill", "raise")
# Forward passes whose originals are held at most until the device has told where their copies are.
AHEAD = 2
# The memory of a pool that nothing has used is freed when the stash has been empty so many times since.
UNUSED = 100


class StashOverflowError(ShimError):
    """Saved tensors were lost because there were not enough pages; the gradients since the last check are wrong."""


@dataclass(frozen=True)
class PoolUse:
    """One pool: its size, what is in use now and the most that was ever wanted, in pages, and its memory in bytes."""

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
    """Saved tensors by what became of them. `wanted` pages of a pool are those of all tensors, wherever they are."""

    stashed: int
    spilled: int
    kept: int
    lost: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    pools: tuple[PoolUse, ...] = ()


class PagedStash:
    """Keeps saved tensors of [rows, ...] in pages, by their valid rows.

    pages, host_pages: the size of each pool, in pages of `page_size` rows. There is one for each device, dtype and row
    width; that on the host is pinned memory, which takes what no longer fits. See `resize` for sizes of each.

    overflow: what becomes of a tensor for which there are no pages, neither in the pool nor on the host:
        "keep": its original stays where it is. The host learns of it without waiting, and holds originals until then:
            those of the last forward passes at most, so that a host that is far ahead of the device waits for it.
        "raise", and "spill" with a host pool: it is lost, and `check` raises.
    While a CUDA graph is captured the host cannot decide; "keep" then does as "raise" does.

    backend: "eager" or "triton"; by default triton's on a GPU where it is installed.

    Gradients are the same, bit for bit, as long as rows that are not valid have no part in them: they are restored as
    zeros, by which a function of one's own must not divide. Pages are given back as soon as autograd lets go of a
    tensor: after its backward, with the graph, or under an exception. Nothing depends on the order.

    ValueError for sizes and policies that are not possible.
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
        self._unsettled: list[_Unsettled] = []
        self._rounds = 0
        self._offered_before = 0

    def __reduce__(self) -> tuple[Callable[..., PagedStash], tuple[Any, ...]]:
        """A copy, also one by pickle, is a new and empty stash of the same settings: what is in this one is its own."""
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
        """function(*args, **kwargs), with what it saves for backward stashed; see `group` for rows, valid, expected.

        Tensors with `rows` rows among the arguments are rows, unless they are parameters or in a dict, where
        torch.func.functional_call has its weights. What is made of others has no rows and is left alone.
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
        """A context for one forward, whose `commit` stashes what was saved in it.

        Saved tensors of operators that are known to keep rows where they are, on all ways to the outputs, are stashed
        by their valid rows; see docs/paged-stash-operators.md. So are inputs and outputs of functions of one's own
        (torch.autograd.Function) that come from `inputs`, which are trusted to keep rows where they are, and to bear
        zeros; what such a function makes for itself is known by `block_of` only. All else is left alone, and counted.

        valid: None for all rows; an int, or an integer tensor of one element, for the first ones; an integer tensor
        [segments] for the first ones of each of so many equal segments; a bool tensor [rows] for any. Rows are those of
        the outputs, whose first dimensions make up `rows`; the others must get no gradient, on any way out.
        expected: how many rows are probably valid, for whoever sizes pools by that (`resize`); all by default.
        inputs: what the forward gets, and where to stop looking; what has `rows` rows and is no parameter is rows.
        Without them, functions of one's own are left alone, and what another thread has made before could be taken for
        a part of the forward, as autograd numbers the nodes of each thread on their own.
        weights: tensors that stay.
        block_of: says of a tensor how many rows one of its own stands for, whatever its shape (1: it has all rows; 32:
        scales of blocks of 32 rows); None where it does not know the tensor.
        compiled: functions of one tensor that torch.compile has compiled and that do each element by itself, as
        activations do; their backward has to bear zeros. All other compiled regions are left alone.
        """
        expected = rows if expected is None else expected
        regions = CompiledRegions(tuple(compiled))
        return StashGroup(self, rows, valid, expected, tuple(inputs), tuple(weights), block_of, regions)

    def skip(self, reason: str) -> None:
        """Count a saved tensor, or a whole forward, that was not stashed."""
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
        """Count how often the stash was empty, and free the pools that nothing has used for many times.

        Between two steps it is empty. A captured pool stays: a replay is not seen here.
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

    # Originals that are kept until the host knows that they were stashed

    def await_flags(self, records: list[weakref.ref[StashedTensor]], flags: Tensor) -> None:
        """Drop the originals of `records` when the host sees that they are in pages; flags: `where` of each, [n]."""
        self._unsettled.append(_Unsettled(records, flags))
        self.settle()

    def settle(self) -> None:
        """Drop the originals of which the host knows by now that they were stashed.

        Waits for nothing, unless the host is further ahead of the device than AHEAD forward passes. Originals of all of
        those would be more memory than without a stash, and the device has enough to do meanwhile.
        """
        if capturing():
            return  # events may not be looked at
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
        """Give pools the pages, and pages on the host, that `sizes` says of them, which may ask them for

        most_expected: the most pages that were to be expected at once; most_full: the most that all rows would take;
        most_wanted(): the most that were wanted in fact, for which it waits for the device.

        Asked are pools in which nothing lives, that no CUDA graph uses, and that had to do with more than before since
        they got their size, or with too much.
        """
        for pool in self._all_pools():
            if pool.live or pool.captured or not pool.outgrown or pool.size_before is not None:
                continue
            wanted = sizes(pool)
            pool.outgrown = False
            if wanted != (pool.pages, pool.host_pages):
                pool.allocate_pages(*wanted)

    def clear(self) -> None:
        """Give up the memory of all pools, also those of a CUDA graph, which must not be replayed again.

        They can be resized, by what they have learnt so far. A pool in which something lives stays as it is.
        """
        for pool in self._all_pools():
            if pool.allocate_pages(0, 0):  # which forgets what size it had
                pool.captured, pool.outgrown = False, True

    def resize_all(self) -> None:
        """Have the next `resize` ask every pool, because what it asks by has changed."""
        for pool in self._all_pools():
            pool.outgrown = True

    def check(self) -> None:
        """Raise StashOverflowError if tensors were lost since the last check; to be called before the optimizer step.

        Waits for the device, once. Warns, once for each reason, where nothing was stashed.
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
        """Whether there is anything that `check` could find."""
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
        """Begin anew to count what is lost, for whoever repeats the step."""
        for pool in self._all_pools():
            pool.current_state()[LOST].zero_()

    def warn_if_idle(self) -> None:
        """Warn, once for each reason, if nothing at all was stashed although there was something to stash."""
        if self._offered or not self.skipped:
            return
        for reason in self.skipped.keys() - self._told:
            self._told.add(reason)
            log.warning("paged stash: nothing was stashed (%d times): %s", self.skipped[reason], reason)

    def statistics(self) -> StashStatistics:
        """What has become of saved tensors so far. Waits for the device."""
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
    """What a module has that is not of one forward."""
    return (*module.parameters(), *module.buffers())


def _except(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    known = {id(tensor) for tensor in others}
    return [tensor for tensor in tensors if id(tensor) not in known]


class _Unsettled:
    """Records of one forward, and their flags on the way to the host."""

    def __init__(self, records: list[weakref.ref[StashedTensor]], flags: Tensor) -> None:
        self.records = records
        self._event: torch.cuda.Event | None = None
        if flags.device.type == "cuda":
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._flags = flags.clone()  # a flag goes back to zero when its record is released

    def is_known(self) -> bool:
        return self._event is None or self._event.query()

    def settle(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        for reference, where in zip(self.records, self._flags.tolist(), strict=True):
            record = reference()
            if record is not None:
                record.settle(where)
