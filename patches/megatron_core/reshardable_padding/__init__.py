"""Checkpoints of the distributed optimizer that can be resharded, with more than one bucket of gradients.

What is wrong (0.15 to 0.19): with `distrib_optim_sharding_type` "fully_reshardable" the main weights and the moments of
most weights are written wrong, in silence, also on one rank. Buckets end in padding, which the gathered state has not.
But the slice of each weight is cut at its place with all padding before it. So from the second bucket on a weight gets
values of its neighbour, and the last ones get zeros. Sizes that are multiples of 128 hide it, and so does
overlap_grad_reduce=False, which makes one bucket. A resumed run trains on with other weights and other moments.

What the patch does: it lets the function see the places of weights without the padding of buckets. Nothing is copied.
If no bucket but the last ends in padding, stock does it all. Reading is right on stock, so a checkpoint that was
written with the patch can be loaded without it. One that stock has damaged stays damaged: if the weights of the
model show, at loading, that the optimizer's are displaced, the patch says so and names the remedy (with the option
`damaged: raise` as an error). That needs the model to be loaded before its optimizer, as trainers do.

Upstream: fixed on main by pull request 5077, in the same way.

Delete when: the releases before the one that brings pull request 5077 are not supported.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shim._errors import ShimError
from shim.patches._arguments import Function, argument
from shim.patches._views import view_with

log = logging.getLogger("shim")

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
WRITE = f"{OPTIMIZER}.sharded_param_state_fully_reshardable"
READ = f"{OPTIMIZER}.load_parameter_state_from_fully_reshardable"

SAMPLE = 32  # elements at the beginning of a weight, by which it is known
LAST = 2  # weights that are looked at first
DISTINCT = 8  # values that a sample needs at least, to be found nowhere by chance
TRIED = 8  # weights that are looked for, of those that are not where they should be
NEIGHBOURS = 3  # weights behind one that may have lent it their values


class DamagedCheckpointError(ShimError, ValueError):
    """The optimizer's part of a checkpoint was written by a release that displaces it."""


def _sharded_param_state_fully_reshardable(original: Function) -> Function:
    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        buffers = [_without_padding(buffer) for buffer in optimizer.buffers]
        if all(map(_same, buffers, optimizer.buffers)):
            return original(*args, **kwargs)
        return original(view_with(optimizer, buffers=buffers), *args[1:], **kwargs)

    return sharded_param_state_fully_reshardable


def _without_padding(buffer: Any) -> Any:
    """The buffer with the places that its weights have in the gathered state; itself where they are the same."""
    shifts = [0]  # by bucket, in elements
    for bucket in buffer.buckets:
        shifts.append(shifts[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    if not any(shifts[:-1]):
        return buffer
    places = {
        weight: (start - shifts[bucket], end - shifts[bucket], bucket)
        for weight, (start, end, bucket) in buffer.param_index_map.items()
    }
    return view_with(buffer, param_index_map=places)


def _same(one: object, other: object) -> bool:
    return one is other


def _load_parameter_state_from_fully_reshardable(original: Function, *, damaged: str) -> Function:
    state_of = argument(original, "state_dict")

    @functools.wraps(original)
    def load_parameter_state_from_fully_reshardable(*args: Any, **kwargs: Any) -> Any:
        optimizer, state = args[0], state_of(args, kwargs)
        displaced = sum(_displaced(weights, saved) for weights, saved in _paired(optimizer.buffers, state))
        if displaced:
            _tell(displaced, len(state), damaged, optimizer.data_parallel_group.rank())
        return original(*args, **kwargs)

    return load_parameter_state_from_fully_reshardable


def _paired(buffers: Sequence[Any], state: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """For each buffer its weights, and what the checkpoint has for them, which counts through all buffers."""
    number = 0
    for buffer in buffers:
        weights = list(buffer.param_index_map)
        yield weights, [state[index].get("param") for index in range(number, number + len(weights))]
        number += len(weights)


def _displaced(weights: Sequence[Tensor], saved: Sequence[Tensor | None]) -> int:
    """How many weights of a buffer, in its order, have values of others in the checkpoint; 0 where that is not sure.

    It is sure where some weights are as they were saved, others are not, and these have the values that stand
    further behind. If any are displaced, all behind them are. So a look at the last ones, by one short transfer from
    the device, is all that a sound checkpoint costs.
    """
    if not all(type(weight) is nn.Parameter for weight in weights) or not all(map(torch.is_tensor, saved)):
        return 0  # quantized weights are not what is saved for them
    with torch.no_grad():
        if not any(differs for _, differs in _samples(weights[-LAST:], saved[-LAST:])):
            return 0
        samples = _samples(weights, saved)
        other = [index for index, (_, differs) in enumerate(samples) if differs]
        if len(other) == len(samples):
            return 0
        known = [index for index in other if len(samples[index][0].unique()) >= DISTINCT][:TRIED]
        found = any(_stands_in(samples[index][0], weights[index : index + 1 + NEIGHBOURS]) for index in known)
    return len(other) if found else 0


def _samples(weights: Sequence[Tensor], saved: Sequence[Any]) -> list[tuple[Tensor, bool]]:
    """The first elements of what is saved for each weight, and whether the weight has others."""
    lengths = [min(weight.numel(), SAMPLE) for weight in weights]
    here = torch.cat([weight.flatten()[:SAMPLE] for weight in weights]).cpu().split(lengths)
    there = [
        value.flatten()[:SAMPLE].to(device="cpu", dtype=weight.dtype)
        for weight, value in zip(weights, saved, strict=True)
    ]
    return [(sample, not torch.equal(sample, mine)) for sample, mine in zip(there, here, strict=True)]


def _stands_in(sample: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the elements of the sample follow one another in one of the weights."""
    for weight in weights:
        flat = weight.flatten()
        starts = (flat[: max(0, len(flat) - len(sample) + 1)] == sample[0].item()).nonzero().flatten()
        for offset in range(1, len(sample)):
            starts = starts[flat[starts + offset] == sample[offset].item()]
        if len(starts):
            return True
    return False


def _tell(displaced: int, weights: int, damaged: str, rank: int) -> None:
    text = (
        f"[reshardable-padding] the optimizer's part of this checkpoint is damaged: {displaced} of {weights} weights "
        "have main weights and moments of their neighbours. It was written by megatron-core 0.15 to 0.19, whose "
        "DistributedOptimizer.sharded_param_state_fully_reshardable displaces them. To train on with it spoils the "
        "model. Load the model without its optimizer, or an earlier checkpoint of another format."
    )
    if damaged == "raise":
        raise DamagedCheckpointError(text)
    if rank == 0:
        log.warning("%s", text)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    read = functools.partial(_load_parameter_state_from_fully_reshardable, damaged=options["damaged"])
    return {WRITE: _sharded_param_state_fully_reshardable, READ: read}
