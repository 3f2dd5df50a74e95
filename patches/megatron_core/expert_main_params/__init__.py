"""Main parameters of experts that are reloaded from a state dict.

What is wrong (0.14 to 0.17): reload_model_params(state_dict=...) gives the main parameters, in fp32, the values of a
checkpoint, because those of the model are rounded to bf16. Under expert parallelism the experts have a separate
optimizer in the chain. ChainedOptimizer gives the state dict of a single chunk to the first of its optimizers only, so
experts start from the rounded values, without a word. With several chunks it counts the chunks of all optimizers
together, and raises an AssertionError about a chunk that there is not.

The patch gives each optimizer the state of the chunks whose parameters it has. Without a state dict, and with a single
optimizer, upstream's function answers.

Upstream: fixed in 0.18 (Megatron-LM issue 3676).

Delete when: 0.14 to 0.17 are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shim.patches._arguments import Function, argument

SPLIT = "megatron.core.optimizer.optimizer:ChainedOptimizer._split_state_dict"


def _of_chunks(state: Mapping[str, Any], places: Sequence[int], chunks: Sequence[Any]) -> dict[str, Any]:
    """The part of a state dict for these chunks, which stand at `places` of the whole model, counted from 0 again."""
    prefix = "model" if "model0" in state else "model_"
    missing = [f"{prefix}{place}" for place in places if f"{prefix}{place}" not in state]
    if missing:
        raise KeyError(f"the state dict has no {missing[0]}, and the model has {len(chunks)} chunks")
    return {f"{prefix}{number}": state[f"{prefix}{place}"] for number, place in enumerate(places)}


def _split_state_dict(original: Function) -> Function:
    state_of = argument(original, "state_dict")

    @functools.wraps(original)
    def split(*args: Any, **kwargs: Any) -> Any:
        chained, state = args[0], state_of(args, kwargs)
        optimizers, chunks = chained.chained_optimizers, chained.model_chunks
        if state is None or len(optimizers) < 2:
            return original(*args, **kwargs)
        if len(chunks) == 1:
            return [state] * len(optimizers)
        place_of = {id(chunk): place for place, chunk in enumerate(chunks)}
        own = [getattr(optimizer, "model_chunks", ()) for optimizer in optimizers]
        return [_of_chunks(state, [place_of[id(chunk)] for chunk in each], chunks) if each else None for each in own]

    return split


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SPLIT: _split_state_dict}
