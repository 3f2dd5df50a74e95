"""Parallel layouts, initialised in place so that one set of ranks can go through many of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Layout", "layout_initialised"]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: sizes of tensor, context and pipeline parallelism.

    vp: virtual stages that every pipeline rank holds, for the interleaved schedule.
    ep: over how many ranks experts are spread; those are replicas, or context-parallel, as far as the rest goes.
    """

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence parallelism needs tp > 1")
        if self.vp > 1 and self.pp == 1:
            raise ValueError("virtual pipeline stages need pp > 1")

    @property
    def world(self) -> int:
        """Ranks that one replica of the model takes."""
        return self.tp * self.pp * math.lcm(self.cp, self.ep)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "vp": self.vp, "ep": self.ep}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.sequence_parallel:
            parts.insert(1, "sp")
        return "+".join(parts) or "tp1"


# lru_caches of megatron-core that outlive a layout: a mask on its device, and tables that keep whole models
# alive.
_CACHES = (
    ("megatron.core.transformer.utils", "get_default_causal_mask"),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding.forward"),
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.forward"),
)


def _clear_what_survives() -> None:
    """Reset the globals that destroy_model_parallel leaves behind."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    get_cuda_rng_tracker().reset()
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    for module, path in _CACHES:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        clear: Callable[[], None] | None = getattr(found, "cache_clear", None)
        if clear is not None:
            clear()


_SHAPES = 2  # of which groups are kept: their threads wake up a hundred times a second


class _Groups:
    """The process groups of layouts that have ended, for the next layout of the same shape.

    gloo waits some ten milliseconds for the thread of a group that ends, and a layout has twenty groups. They belong to
    one default group, and are freed when there is another.
    """

    def __init__(self) -> None:
        self._default: Any = None
        self._kept: dict[tuple[int, ...], list[tuple[tuple[int, ...], Any]]] = {}

    def free(self, but: int = 0) -> None:
        """All, or all but those of the layouts that were used last."""
        while len(self._kept) > but:
            for _, group in self._kept.pop(next(iter(self._kept))):
                # Other ranks have a marker instead; and whoever destroys the default group destroys all.
                if isinstance(group, dist.ProcessGroup) and group in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)
        self._default = self._default if but else None

    @contextlib.contextmanager
    def lent(self, layout: Layout) -> Iterator[None]:
        """dist.new_group hands out what it made for the same layout before. All ranks do so, or none."""
        if self._default is not dist.group.WORLD:
            self.free()
            self._default = dist.group.WORLD
        shape = (layout.tp, layout.cp, layout.pp, layout.vp, layout.ep)
        kept = self._kept[shape] = self._kept.pop(shape, [])
        self.free(but=_SHAPES)
        new_group, place = dist.new_group, 0

        def lend(*args: Any, **kwargs: Any) -> Any:
            nonlocal place
            members = tuple(args[0] if args else kwargs["ranks"])
            if kept[place:] and kept[place][0] != members:  # whoever changes what megatron does
                del kept[place:]
            if not kept[place:]:
                kept.append((members, new_group(*args, **kwargs)))
            place += 1
            return kept[place - 1][1]

        dist.new_group = lend
        try:
            yield
        finally:
            dist.new_group = new_group


_GROUPS = _Groups()


def free_groups() -> None:
    """Free the groups that are kept for the next layout: a forked rank could not end their threads."""
    _GROUPS.free()


@contextlib.contextmanager
def layout_initialised(layout: Layout, seed: int = 123) -> Iterator[Layout]:
    """Initialise megatron's parallel state for `layout`, seed, and clean up on exit; needs `megatron_on_cpu`.

    A world of 1 without torch.distributed gets a gloo group over an in-process store; larger worlds must be
    initialised already (`Ranks` does so). That default group stays, so that layouts can follow one another, and the
    groups of the layout stay for the next one of the same shape. Ranks beyond `layout.world` become data-parallel
    replicas.

    Raises RuntimeError when the world does not fit, or when a layout is active already.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        if layout.world != 1:
            raise RuntimeError(f"layout {layout} needs {layout.world} ranks: run it inside shim.testing.Ranks")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() % layout.world:
        raise RuntimeError(f"layout {layout} needs {layout.world} ranks, the world has {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError(f"layout {layout}: another layout is still active")
    with contextlib.ExitStack() as cleanup:
        with _GROUPS.lent(layout):
            cleanup.callback(parallel_state.destroy_model_parallel)
            cleanup.callback(_forget_groups)  # before: it destroys some itself, if they are still there
            cleanup.callback(_clear_what_survives)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
            )
        # No rank goes ahead while another still connects its groups.
        dist.barrier()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        yield layout


def _forget_groups() -> None:
    """Take its groups from megatron: some it would keep, and a forked rank could not end their threads."""
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
