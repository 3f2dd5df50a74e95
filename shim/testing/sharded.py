"""Checkpoints and gradients by megatron-core's sharding: which part of which whole tensor a rank has."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.managers import SyncManager
from typing import Any

import torch
from torch import Tensor, nn

from .forks import forking
from .proof import CannotRunError
from .user_model import ModelError, line_of

__all__ = ["Shard", "difference_of_shards", "load", "save", "save_anyway", "shards_of"]

WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


@dataclass(frozen=True)
class Shard:
    """A rank's part of a whole tensor. place: an index into the whole, of the shape `whole`."""

    key: str
    whole: tuple[int, ...]
    place: tuple[Any, ...]
    value: Tensor


def save(model: Any, directory: str) -> None:
    """Save what model.sharded_state_dict() has into an empty directory.

    Raises ModelError, and CannotRunError if this megatron-core can save no model with this torch.
    """
    _refuse_what_cannot_be_saved()
    save_anyway(model, directory)


def save_anyway(model: Any, directory: str) -> None:
    """`save`, also if this megatron-core will fail. Raises ModelError."""
    with _told("saving"):
        from megatron.core import dist_checkpointing

        with _written_here():
            dist_checkpointing.save(model.sharded_state_dict(), directory)


def load(model: Any, directory: str) -> None:
    """Load what `save` has saved, maybe in another layout. Raises ModelError."""
    with _told("loading"):
        from megatron.core import dist_checkpointing

        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), directory))


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    """An error of megatron-core as a ModelError, and a library that it lacks as a reason why this cannot run."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except ImportError as error:
        raise CannotRunError(f"{doing} a checkpoint needs a library that is not installed: {error}") from error
    except CheckpointException as error:  # no Exception, but a BaseException
        causes = [cause for cause, _ in error.failures.values()]
        raise ModelError(f"{doing}, {line_of(causes[0] if causes else error)}") from error
    except Exception as error:
        raise ModelError(f"{doing}, {line_of(error)}") from error


def _refuse_what_cannot_be_saved() -> None:
    with _told("saving"):
        writer: Any = import_module(WRITER)
    signature = inspect.signature(writer._write_item, follow_wrapped=False)  # a wrapper may give the required arguments
    required = signature.parameters.get("serialization_format")
    if not required or required.default is not required.empty or "serialization_format" in inspect.getsource(writer):
        return
    raise CannotRunError(
        "megatron-core up to 0.12 saves no checkpoint with torch 2.7 and later: it calls torch's _write_item() without "
        "serialization_format. Apply checkpoint-write-format, or use megatron-core 0.13 and later, or torch 2.6"
    )


@contextlib.contextmanager
def _written_here() -> Iterator[None]:
    """Let megatron-core write files without a spawned process that keeps the writers' results, and without psutil.

    A spawned process would import the user's main module again. psutil serves only the log; 0.12 imports it. Up to 0.16
    megatron-core forks the processes that write, which a rank of `Ranks` may not, as it is a daemon.
    """
    writer: Any = import_module(WRITER)
    process: Any = multiprocessing.current_process()
    daemon = process._config.get("daemon")
    with contextlib.ExitStack() as stack:
        process._config["daemon"] = False
        stack.callback(process._config.__setitem__, "daemon", daemon)
        stack.enter_context(forking())  # up to 0.16 forked processes write the files
        substitutes: dict[str, Any] = {"_results_queue": stack.enter_context(_results_queue())}
        if not getattr(writer, "HAVE_PSUTIL", True):
            substitutes["_process_memory"] = lambda: 0
        before = {name: vars(writer)[name] for name in substitutes if name in vars(writer)}
        for name, value in before.items():
            stack.callback(setattr, writer, name, value)
            setattr(writer, name, substitutes[name])
        yield


@contextlib.contextmanager
def _results_queue() -> Iterator[Any]:
    """A queue of this process; or, up to 0.14, one that a process forked for the whole save can also fill."""
    strategies = "megatron.core.dist_checkpointing.strategies.base"
    if not find_spec(strategies) or not hasattr(import_module(strategies), "async_calls"):
        yield queue.Queue()
        return
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    with forking() as collect_what_comes:
        manager.start(collect_what_comes)
    with manager:
        yield manager.Queue()


def shards_of(model: Any, grads: Mapping[str, Tensor]) -> list[Shard]:
    """This rank's parts of the gradients, as the model's own sharded_state_dict cuts its weights."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    with _in_place_of_weights(model, grads):
        state = model.sharded_state_dict()
        apply_factories(state)
        return [
            Shard(found.key, tuple(found.global_shape), _place_of(found), found.data.detach().clone())
            for found in nested_values(state)
            if isinstance(found, ShardedTensor) and found.data is not None and found.data.is_floating_point()
        ]


def _place_of(sharded: Any) -> tuple[int | slice, ...]:
    """A ShardedTensor's place in the whole. Its axes are the last ones; it is one entry along those before them."""
    starts, lengths = sharded.global_offset, sharded.local_shape
    before = len(starts) - len(lengths)
    parts = [slice(start, start + length) for start, length in zip(starts[before:], lengths)]
    return (*starts[:before], *parts)


@contextlib.contextmanager
def _in_place_of_weights(model: nn.Module, grads: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the weights hold their gradients, and zeros without one."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: tensor.data for name, tensor in held.items() if tensor.is_floating_point()}
    try:
        for name, value in before.items():
            held[name].data = grads[name].to(value.dtype) if name in grads else torch.zeros_like(value)
        yield
    finally:
        for name, value in before.items():
            held[name].data = value


def difference_of_shards(ranks: Sequence[Sequence[Shard]], truth: Sequence[Shard]) -> float:
    """The norm of the difference over the norm of the truth, over all tensors together.

    ranks: the shards of each rank. truth: those of one rank, which has everything. Where several ranks have the same
    part, the worst of them counts. Raises CannotRunError for tensors of another shape than in the truth.
    """
    wholes: dict[str, Tensor] = {}
    for shard in truth:
        whole = wholes.setdefault(shard.key, torch.zeros(shard.whole, dtype=torch.float64))
        whole[shard.place] = shard.value.double()
    off: dict[tuple[str, str], Tensor] = {}
    for shard in (shard for shards in ranks for shard in shards):
        whole = wholes.get(shard.key, torch.zeros(0))
        if tuple(whole.shape) != shard.whole:
            raise CannotRunError(
                f"{shard.key} has the shape {list(shard.whole)} under tensor parallelism, and {list(whole.shape)} on "
                "one rank: build() must make the same model, with a vocabulary that needs no other padding"
            )
        wrong = (shard.value.double() - whole[shard.place]).square().sum()
        place = (shard.key, str(shard.place))
        off[place] = torch.maximum(off[place], wrong) if place in off else wrong
    norm = sum((whole.square().sum() for whole in wholes.values()), torch.zeros(()))
    wrong = sum(off.values(), torch.zeros(()))
    return float((wrong / norm).sqrt()) if wrong != 0 else 0.0
