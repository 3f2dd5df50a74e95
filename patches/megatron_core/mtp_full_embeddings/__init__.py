"""Embeddings of multi-token prediction in a language model that does not scatter its own.

What is wrong (0.12 to 0.19): the language model of a model for images and text is built with
scatter_embedding_sequence_parallel=False. The wrapper around it puts images into the embeddings of the whole row, and
gives each rank its share of the row for sequence parallelism. Layers of multi-token prediction call the same embedding
and join what it returns with their hidden states: the whole row with a share. The first step with sequence parallelism
raises a RuntimeError: "Sizes of tensors must match".

The patch scatters what the embedding returns to those layers, if that is the whole row: TP times as long as their
hidden states. An embedding that returns the rank's share, such as that of a wrapper that scatters for these layers,
stays as it is. The share is a copy if clone_scatter_output_in_embedding is set, as in upstream's embedding, so the
whole row is not kept for backward.

Upstream: 0.20 scatters in the layer, if the attribute of the embedding says that it does not (Megatron-LM pull request
6256).

Not covered: a subclass of the layer with a _get_embeddings of its own, and a wrapper that gives the layers tokens of
the whole row under context parallelism. Upstream's layers join embeddings of the tokens, also where the row has an
image.

Delete when: megatron-core 0.19 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import Called
from shim.patches.megatron_core._row_shares import ranks_of, row_share

MTP = "megatron.core.transformer.multi_token_prediction:"
CALLERS = {
    "v0_12": MTP + "MultiTokenPredictionBlock.forward",
    "v0_14": MTP + "MultiTokenPredictionLayer._get_embeddings",
}


def _caller(original: Function) -> Function:
    """The method that calls the embedding."""
    states_of = argument(original, "hidden_states")
    embedding_of, with_embedding = argument(original, "embedding"), replacing(original, "embedding")

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = args[0]
        if module.config.sequence_parallel:
            shares = _shares(embedding_of(args, kwargs), len(states_of(args, kwargs)), module)
            args, kwargs = with_embedding(args, kwargs, shares)
        return original(*args, **kwargs)

    return call


def _shares(embedding: Any, length: int, module: Any) -> Called:
    """An embedding that returns this rank's share of the row, `length` tokens, [s, b, h]."""

    def call(*args: Any, **kwargs: Any) -> Any:
        made = embedding(*args, **kwargs)
        group = getattr(module, "tp_group", None)  # from 0.17 on
        if len(made) == length or len(made) != length * ranks_of(group)[0]:
            return made  # what has any other length is for upstream to judge
        return row_share(made, group, module.config)

    return Called(embedding, call)


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    parts = (part for model in models for part in model.modules())
    whole = any(getattr(part, "scatter_to_sequence_parallel", True) is False for part in parts)
    if not module.config.sequence_parallel or not whole:
        return True  # the layers get the rank's share in any case
    return "shim does not try whether it scatters embeddings of the whole row"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {CALLERS[variant]: _caller}
