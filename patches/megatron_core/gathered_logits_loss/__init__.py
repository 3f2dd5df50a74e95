"""The loss of logits that are gathered over tensor-parallel ranks.

What is wrong (0.12 to 0.19): with `parallel_output=False` or `runtime_gather_output=True` the output layer gives each
rank the logits of the whole vocabulary. compute_language_model_loss takes them for this rank's part of it, so a rank
counts every logit once more, and looks for the targets of other ranks behind the end of its own: losses and gradients
are wrong, without a word.

The patch passes this rank's part of the gathered logits on. The gradient of the gather takes this part again.
Parts of the vocabulary, and the logits of one rank, are passed on as they are.

Upstream: open (Megatron-LM issue 7452).

Delete when: compute_language_model_loss takes gathered logits, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core._row_shares import ranks_of

LANGUAGE = "megatron.core.models.common.language_module.language_module:LanguageModule."


def _compute_language_model_loss(original: Function) -> Function:
    logits_of, with_logits = argument(original, "logits"), replacing(original, "logits")

    @functools.wraps(original)
    def compute_language_model_loss(*args: Any, **kwargs: Any) -> Any:
        model, logits = args[0], logits_of(args, kwargs)
        if logits.size(-1) == getattr(model, "vocab_size", None):
            groups = getattr(model, "pg_collection", None)  # from 0.15 on
            ranks, mine = ranks_of(groups and groups.tp)
            if ranks > 1:
                # Upstream's kernels take whole rows only.
                part = logits.chunk(ranks, -1)[mine].contiguous()
                args, kwargs = with_logits(args, kwargs, part)
        return original(*args, **kwargs)

    return compute_language_model_loss


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {LANGUAGE + "compute_language_model_loss": _compute_language_model_loss}
