"""A language model that does not scatter its embeddings, called with tokens under sequence parallelism.

What is wrong (0.12 to 0.18): the language model of a model for images and text is built with
scatter_embedding_sequence_parallel=False, because the wrapper around it scatters the embeddings after it has put images
into them. Called by itself with tokens, as for text alone or for distillation of the language model, each rank gets the
embeddings of the whole row for its share. The model takes them for one row that is TP times as long. With labels it
raises an IndexError about shapes. Without labels it returns logits of that row, in silence.

The patch computes the embeddings, scatters them, and hands them to the model as `decoder_input`. The padding mask of a
GPTModel (0.16 and later) is cut like them, as it is if the model computes the embeddings. The share is a copy if
clone_scatter_output_in_embedding is set, as in upstream's embedding. A call with `decoder_input`, a model whose
embedding scatters, and one whose embedding returns something else than the whole row, because a hook has scattered it,
stay as they are.

Upstream: fixed in 0.19 (Megatron-LM pull request 5628).

Not covered: inference with an inference context.

Delete when: megatron-core 0.18 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, parameters_of, replacing
from shim.patches.megatron_core._row_shares import ranks_of, row_share

GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
MAMBA = "megatron.core.models.mamba.mamba_model:MambaModel.forward"
HYBRID = "megatron.core.models.hybrid.hybrid_model:HybridModel.forward"
CONTEXTS = ("inference_context", "inference_params")


def _from_tokens(original: Function, cuts_mask: bool = False) -> Function:
    """The method that computes the embeddings. cuts_mask: it gives each rank its share of a padding mask as well."""
    known = parameters_of(original)
    ids_of, places_of = argument(original, "input_ids"), argument(original, "position_ids")
    given_of, with_given = argument(original, "decoder_input"), replacing(original, "decoder_input")
    contexts = [argument(original, name) for name in CONTEXTS if name in known]
    masks = cuts_mask and "padding_mask" in known  # from 0.16 on
    mask_of = argument(original, "padding_mask") if masks else lambda args, kwargs: None
    with_mask = replacing(original, "padding_mask") if masks else None

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = args[0]
        if given_of(args, kwargs) is not None or not _gets_whole_rows(model):
            return original(*args, **kwargs)
        if any(context_of(args, kwargs) is not None for context_of in contexts):
            return original(*args, **kwargs)
        ids, group = ids_of(args, kwargs), getattr(model.embedding, "tp_group", None)  # from 0.13 on
        made = model.embedding(input_ids=ids, position_ids=places_of(args, kwargs))
        if len(made) == ids.size(1):
            made = row_share(made, group, model.config)
        args, kwargs = with_given(args, kwargs, made)
        mask = mask_of(args, kwargs)
        if with_mask and mask is not None:
            ranks, mine = ranks_of(group)
            args, kwargs = with_mask(args, kwargs, mask.chunk(ranks, dim=1)[mine].contiguous())
        return original(*args, **kwargs)

    return call


def _gets_whole_rows(model: Any) -> bool:
    if not model.pre_process or not model.config.sequence_parallel:
        return False
    return getattr(model.embedding, "scatter_to_sequence_parallel", None) is False


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md."""
    if not _gets_whole_rows(module):
        return True  # its embedding scatters, or nothing is to be scattered
    return "shim does not try whether it scatters embeddings of the whole row"


BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {GPT + "forward": _from_tokens, MAMBA: _from_tokens},
    "v0_13": {GPT + "_preprocess": functools.partial(_from_tokens, cuts_mask=True), MAMBA: _from_tokens},
    "v0_18": {GPT + "_preprocess": functools.partial(_from_tokens, cuts_mask=True), HYBRID: _from_tokens},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
