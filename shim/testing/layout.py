"""Parallel layouts, initialised in place, so that the same ranks can use many layouts in turn."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shim._torch_names import missing

from .forks import free_groups

__all__ = ["Layout", "layout_initialised"]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: sizes of tensor, context and pipeline parallelism.

    vp: virtual stages per pipeline rank, for the interleaved schedule.
    ep: ranks that share the experts. For other layers these ranks are replicas or context-parallel.
    etp: tensor parallelism of the experts; that of the other layers by default.
    """

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence parallelism needs tp > 1")
        if self.vp > 1 and self.pp == 1:
            raise ValueError("virtual pipeline stages need pp > 1")

    @property
    def world(self) -> int:
        """The number of ranks of one model replica."""
        experts = self.tp if self.etp is None else self.etp
        return self.pp * math.lcm(self.tp * self.cp, experts * self.ep)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "vp": self.vp, "ep": self.ep}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.etp not in (None, self.tp):
            parts.append(f"etp{self.etp}")
        if self.sequence_parallel:
            parts.insert(1, "sp")
        return "+".join(parts) or "tp1"


# lru_caches of megatron-core that outlive a layout: a mask on its device, and tables that keep models alive.
_CACHES = (
    ("megatron.core.transformer.utils", "get_default_causal_mask"),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding.forward"),
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.forward"),
)


def _clear_what_survives() -> None:
    """Reset the globals that destroy_model_parallel does not."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    get_cuda_rng_tracker().reset()
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    _clear_losses_of_experts()
    for module, path in _CACHES:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        clear: Callable[[], None] | None = getattr(found, "cache_clear", None)
        if clear is not None:
            clear()


def _clear_losses_of_experts() -> None:
    """Reset the scale of auxiliary losses, and their log, which has an entry for each layer of a model."""
    utils: Any = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if utils is not None:
        utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
        vars(utils).get("_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()  # 0.13 to 0.17
    logged: Any = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logged is not None:
        logged._MOE_METRICS_TRACKER = None


@contextlib.contextmanager
def _recorded_groups() -> Iterator[list[dist.ProcessGroup]]:
    """Collect the process groups made inside, because destroy_model_parallel forgets them without freeing them."""
    groups: list[dist.ProcessGroup] = []
    new_group = dist.new_group

    def recording_new_group(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # other ranks get a marker instead
            groups.append(group)
        return group

    dist.new_group = recording_new_group
    try:
        yield groups
    finally:
        dist.new_group = new_group


_DEVICES: dict[int, Any] = {}  # process id -> device; a forked rank lacks its parent's threads


_C10D = "torch.distributed.distributed_c10d:"
_GLOO = [f"{_C10D}ProcessGroupGloo{name}" for name in ("", "._Options", ".create_device", ".create_default_device")]
_STORE_RANK_SIZE = ("store", "rank", "size")  # torch passes these to a gloo group by position


def _options(gloo: Any, device: Any, given: dict[str, Any]) -> Any:
    """Options of a gloo group on this device with torch's arguments by name; None if they cannot express them.

    torch passes more in later releases, such as `enable_reconfigure` from 2.14 on. An attribute that options do not
    have raises AttributeError.
    """
    try:
        options = gloo._Options()
        options._devices, options._threads = [device], 1
        for name, value in given.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
    except AttributeError:
        return None
    return options


@contextlib.contextmanager
def _one_device() -> Iterator[None]:
    """Let all gloo groups made inside share one device.

    Otherwise each of a layout's twenty groups has its own device. The thread of a device wakes up a hundred times a
    second, and takes ten milliseconds to end.
    """
    torchs: Any = c10d
    if missing(_GLOO):
        yield
        return
    gloo = torchs.ProcessGroupGloo
    process = os.getpid()
    if process not in _DEVICES:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        _DEVICES[process] = gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    # A subclass, because torch checks the type.
    class OnOneDevice(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = _options(gloo, _DEVICES[process], kwargs) if len(args) == len(_STORE_RANK_SIZE) else None
            if options is None:
                # Passed on unchanged, the group gets a separate device, which is slower and as right.
                super().__init__(*args, **kwargs)
            else:
                super().__init__(*args, options)

    torchs.ProcessGroupGloo = OnOneDevice
    try:
        yield
    finally:
        torchs.ProcessGroupGloo = gloo


@contextlib.contextmanager
def layout_initialised(layout: Layout, seed: int = 123) -> Iterator[Layout]:
    """Initialise megatron's parallel state for `layout`, seed, and clean up on exit. Needs `megatron_on_cpu`.

    A world of 1 without torch.distributed gets a gloo group over an in-process store. Larger worlds must already be
    initialised (`Ranks` does so). The default group stays, so that further layouts can follow. The groups of the
    layout are freed. Ranks beyond `layout.world` become data-parallel replicas.

    Raises RuntimeError if the world does not fit, or if a layout is active already.
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
        with _one_device(), _recorded_groups() as groups:
            cleanup.callback(_forget_groups)
            cleanup.callback(parallel_state.destroy_model_parallel)
            # Runs before destroy_model_parallel, which would free some groups again.
            cleanup.callback(free_groups, groups)
            cleanup.callback(_clear_what_survives)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
            )
        # Without the barrier one rank may free its groups while another still connects, which then fails.
        dist.barrier()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        yield layout


def _forget_groups() -> None:
    """Drop the groups that destroy_model_parallel keeps, because a forked rank could not end their threads.

    It keeps the ranks of embedding groups as well (those of position embeddings in 0.12 only), so a rank would
    be in a group of the last layout.
    """
    from megatron.core import parallel_state

    parallel_state._EMBEDDING_GLOBAL_RANKS = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
