"""Upstream's functions around its fused experts (from 0.18): each hands its call on to the ExpertStash."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function
from shim.patches.megatron_core.paged_stash.experts import ExpertStash


def patch_fused_forward(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def _fused_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = stash.enter_module(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            stash.leave_module(outer)

    return _fused_forward


def patch_group_start(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_group_start(tensor: Tensor) -> Tensor:
        stash.begin(tensor)
        return tensor

    return paged_stash_group_start


def patch_get_context(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def get_paged_stash_context(
        name: str | None = None,
        max_num_tokens: Any = None,
        num_tokens_tensor: Any = None,
        avg_num_tokens: int | None = None,
    ) -> Any:
        return stash.open(max_num_tokens, num_tokens_tensor, avg_num_tokens)

    return get_paged_stash_context


def patch_group_commit(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_group_commit(tensor: Tensor, name: str | None = None) -> Tensor:
        stash.commit(tensor)
        return tensor

    return paged_stash_group_commit


def patch_init_chunk_handler(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_init_chunk_handler(vp_size: int | None, vp_stage: int | None) -> None:
        """Does nothing: the stash expects no order of chunks."""

    return paged_stash_init_chunk_handler


def patch_reset(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_reset(enabled: bool = True, config: Any = None) -> None:
        stash.step_begins(enabled, config)

    return paged_stash_reset


def patch_overflow(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def check_paged_stash_overflow() -> Tensor:
        return stash.overflowed()

    return check_paged_stash_overflow


def patch_host_spill(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def check_paged_stash_host_spill() -> Tensor:
        return stash.spilled()

    return check_paged_stash_host_spill


def patch_release(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def release_stash_buffers(self: Any) -> None:
        original(self)
        stash.release()

    return release_stash_buffers
