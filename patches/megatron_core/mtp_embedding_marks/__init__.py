"""Marks of the embeddings that the stage of multi-token prediction has a copy of.

What is wrong: the stage of multi-token prediction (MTP) has a copy of the first stage's embeddings, which has to stay
equal to it. LanguageModule marks the weight of the first stage, and the copy lacks two of the marks.
1. `zero_out_wgrad` (0.12 to 0.20): a tied copy on the last stage is also the weight of the output layer. With
   gradient_accumulation_fusion the output layer adds its gradient to main_grad itself, and hands autograd memory that
   nothing has written. DistributedDataParallel therefore drops what autograd has, unless this mark says that it is
   zero. The gradient of the embeddings of MTP is lost, in silence. One pipeline stage alone has the mark.
2. `is_embedding_or_output_parameter` (0.12 to 0.17): with `decoupled_lr` the copy is trained with the learning rate of
   all other weights, and Muon orthogonalizes its update, where the first stage's goes to Adam. So the two differ from
   the first step on.

The patch sets both marks on the copy when the model sets its embeddings up. Marks change nothing else: without
fused accumulation, decoupled_lr and Muon a run has stock's bits.

Upstream: the second is Megatron-LM pull request 5034, in 0.18. The first is open.

Delete when: megatron-core itself sets zero_out_wgrad on a tied copy of MTP, and the releases before that are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

SETUP = "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer"


def _setup(original: Function) -> Function:
    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if getattr(self, "mtp_process", False) and not self.pre_process:
            weight = self.embedding.word_embeddings.weight
            weight.is_embedding_or_output_parameter = True
            # Untied, or without the output layer, autograd has all of its gradient.
            if self.post_process and self.share_embeddings_and_output_weights:
                weight.zero_out_wgrad = True
        return found

    return setup_embeddings_and_output_layer


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SETUP: _setup}
