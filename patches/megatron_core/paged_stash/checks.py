"""What shim.check() says of a model whose experts are to be stashed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from shim import ops
from shim.patches._stubs import holder_of
from shim.patches.megatron_core.paged_stash.experts import ExpertStash
from shim.patches.megatron_core.paged_stash.plain_experts import FUSED_ASK_THE_CONFIG, is_fused
from shim.patches.megatron_core.paged_stash.settings import FLAG, cannot_gain, check_settings
from shim.patches.megatron_core.paged_stash.stashes import total_of

MLP = "megatron.core.transformer.mlp:MLP.forward"
STASHES: weakref.WeakSet[ExpertStash] = weakref.WeakSet()  # one of each apply()


def statistics() -> ops.StashStatistics:
    """The outcomes of experts' saved tensors since the patch was applied. Waits for the device."""
    return total_of(stash.statistics() for stash in list(STASHES))


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Pairs for shim.check(): why nothing is stashed, and the remedy. OptionError for settings that a step refuses."""
    modules = [
        m for model in models for m in model.modules() if getattr(getattr(m, "config", None), "num_moe_experts", 0)
    ]
    configs = {id(module.config): module.config for module in modules}.values()
    stashes = list(STASHES)
    remedy = "set it in the config, or by shim.apply(options={'paged-stash': {'moe_paged_stash': True}})"
    asking = [(stash, config) for stash in stashes for config in configs if stash.asked(config)]
    for stash, config in asking:
        check_settings(stash.options, stash.settings(config))
    if not modules:
        yield "the model has no experts", "none is needed"
    elif not asking:
        yield "moe_paged_stash is not set", remedy
    else:
        reasons = [_reason(module, stash) for module in modules for stash in stashes if stash.asked(module.config)]
        if all(reasons):
            yield reasons[0], "see `shim explain paged-stash` for what gains by a stash"


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. Upstream's shared experts have a forward of their own, and nothing to stash."""
    if not any(stash.asked(module.config) for stash in list(STASHES)):
        return True
    if method == MLP and holder_of(module, "local_experts", models) is None:
        return True
    return "shim has no way to try experts on a tiny input"


def _reason(module: Any, stash: ExpertStash) -> str:
    """Why experts with such a config are not stashed; "" if they are."""
    if not is_fused(module):
        return cannot_gain(module.config, stash.settings(module.config))
    return "" if getattr(module.config, FLAG, False) else FUSED_ASK_THE_CONFIG
