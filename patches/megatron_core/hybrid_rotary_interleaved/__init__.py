"""Rotary positions of hybrid models that rotate interleaved pairs (rotary_interleaved).

What is wrong (0.12 to 0.20), silent: attention rotates by `rotary_interleaved` of the config, and the table of angles
has to be made for it: each angle twice in a row, and not in two halves. GPTModel, BertModel and T5Model say so to their
rotary embedding. MambaModel, or HybridModel from 0.18 on, does not, so that its table is made for halves. The two
numbers of a pair turn by different angles then: what attention sees of a token depends on where the row begins.

The patch gives the rotary embedding of a model that is built the word of its config. The table of the other way is not
made. Nothing changes without `rotary_interleaved`.

Not covered: a model that was built before the patch came, which shim.check() tells of.

Upstream: open.

Delete when: the hybrid model of megatron-core gives its rotary embedding `rotary_interleaved`, and the releases before
that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function

MODELS = {
    "v0_12": ("megatron.core.models.mamba.mamba_model", "MambaModel"),
    "v0_18": ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
}


def _init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _has_the_other_table(self):
            self.rotary_pos_emb.rotary_interleaved = True

    return __init__


def _has_the_other_table(model: Any) -> bool:
    embedding = getattr(model, "rotary_pos_emb", None)
    return model.config.rotary_interleaved and getattr(embedding, "rotary_interleaved", True) is False


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """What keeps the patch from its effect: a model that was built before."""
    known = [getattr(sys.modules.get(module), name, None) for module, name in MODELS.values()]
    kinds = tuple(kind for kind in known if isinstance(kind, type))
    for model in models:
        if any(isinstance(module, kinds) and _has_the_other_table(module) for module in model.modules()):
            yield "its rotary table is made for halves, not for pairs", "call shim.apply() before the model is built"


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    module, name = MODELS[variant]
    return {f"{module}:{name}.__init__": _init}
