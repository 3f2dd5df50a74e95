"""Checkpoints of multi-token prediction with tied embeddings over pipeline stages.

What is wrong (0.15 to 0.20): such a model can be neither saved nor loaded by megatron.core.dist_checkpointing.
1. The last stage has the embeddings of multi-token prediction, and an output layer with a weight that nobody uses,
   because it takes that of the embeddings. `sharded_state_dict` takes that weight for missing, and raises an
   AssertionError, if the stage is not the first.
2. 0.16 also raises a TypeError, tied or not, if `sharded_state_dict` is called without metadata.

The patch:
1. The weight of the output layer is a copy of the first stage's embeddings in the file, as without multi-token
   prediction: it is loaded from them, and not saved.
2. A call without metadata gets what the default stands for.

0.12 to 0.14 have the first defect, too, but their loader refuses two copies of a weight on one rank (docs/left.md).

Upstream: open.

Delete when: a release saves such a model, and those before it are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with

TIE = (
    "megatron.core.models.common.language_module.language_module:"
    "LanguageModule.tie_embeddings_and_output_weights_state_dict"
)
MODEL = "megatron.core.models.gpt.gpt_model:GPTModel.sharded_state_dict"


def _tie(original: Function) -> Function:
    state_of, key_of = argument(original, "sharded_state_dict"), argument(original, "output_layer_weight_key")

    @functools.wraps(original)
    def tie_embeddings_and_output_weights_state_dict(*args: Any, **kwargs: Any) -> Any:
        model, *rest = args
        predicts = getattr(model, "mtp_process", False) and model.post_process and not model.pre_process
        if predicts and key_of(args, kwargs) in state_of(args, kwargs):
            # As a last stage without multi-token prediction, whose output layer has the weight.
            output = model.output_layer
            model = view_with(model, mtp_process=False, shared_embedding_or_output_weight=lambda: output.weight)
        return original(model, *rest, **kwargs)

    return tie_embeddings_and_output_weights_state_dict


def _sharded_state_dict(original: Function) -> Function:
    metadata_of, with_metadata = argument(original, "metadata"), replacing(original, "metadata")

    @functools.wraps(original)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        if metadata_of(args, kwargs) is None:
            args, kwargs = with_metadata(args, kwargs, {})  # which the base class fills
        return original(*args, **kwargs)

    return sharded_state_dict


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TIE: _tie, **({MODEL: _sharded_state_dict} if variant == "v0_16" else {})}
