"""The logs of losses of several models in one process, if they have different numbers of layers.

What is wrong (0.12 to 0.20): auxiliary losses of experts, losses of multi-token prediction (MTP) and of DSA's indexer
are kept for the log in tensors with a place for each layer, one for the whole process. The first model that runs makes
them, as long as it needs. A deeper one, as a critic or teacher beside an actor, raises "IndexError: index 2 is out of
bounds for dimension 0 with size 2" in its forward pass.

The patch makes a tensor longer when a model with more layers comes. Its values stay. If all models have the length
of the first one it is a look at a length in each layer. What the trackers say stays stock's: the sums of all models
that ran since the last report.

Upstream: open. On the dev branch the tracker of DSA becomes longer by itself.

Delete when: megatron-core makes a tracker longer if a model needs it, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument, replacing

CORE = "megatron.core."
EXPERTS = CORE + "transformer.moe.moe_utils"
LOGGING = CORE + "transformer.moe.moe_logging:MoEMetricsTracker."
MTP = CORE + "transformer.multi_token_prediction:MTPLossLoggingHelper."
DSA = CORE + "transformer.experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper.save_loss_to_tracker"


def _grown(values: Tensor, layers: int) -> Tensor:
    missing = layers - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)) if missing > 0 else values


def _grow(tracker: dict[str, Any], layers: int) -> None:
    """The tensors of a tracker of one kind of loss. Others are groups of ranks."""
    for name, values in list(tracker.items()):
        if isinstance(values, Tensor):
            tracker[name] = _grown(values, layers)
    if (counts := tracker.get("acceptance_counts")) is not None:
        # The dev branch: [2, layers], whose rows are also kept by name.
        tracker["correct_values"], tracker["total_values"] = counts


def _save_auxiliary_loss(original: Function) -> Function:
    """Up to 0.17: a tracker of dictionaries, by the name of the loss."""
    name_of, layers_of = argument(original, "name"), argument(original, "num_layers")

    @functools.wraps(original)
    def save_to_aux_losses_tracker(*args: Any, **kwargs: Any) -> Any:
        where = sys.modules[EXPERTS]
        # 0.12 has it in parallel_state.
        state = where if hasattr(where, "get_moe_layer_wise_logging_tracker") else sys.modules[CORE + "parallel_state"]
        _grow(state.get_moe_layer_wise_logging_tracker().get(name_of(args, kwargs), {}), layers_of(args, kwargs) or 0)
        return original(*args, **kwargs)

    return save_to_aux_losses_tracker


def _record(original: Function) -> Function:
    """From 0.18: entries with values."""
    name_of, layers_of = argument(original, "name"), argument(original, "num_layers")

    @functools.wraps(original)
    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = self.metrics.get(name_of((self, *args), kwargs))
        if entry is not None:
            entry.values = _grown(entry.values, layers_of((self, *args), kwargs) or 0)
        return original(self, *args, **kwargs)

    return record


def _save(module: str, owner: str) -> Callable[[Function], Function]:
    """One tracker, on a class."""

    def factory(original: Function) -> Function:
        layers_of = argument(original, "num_layers")

        @functools.wraps(original)
        def save_loss_to_tracker(*args: Any, **kwargs: Any) -> Any:
            _grow(getattr(sys.modules[module], owner).tracker, layers_of(args, kwargs) or 0)
            return original(*args, **kwargs)

        return save_loss_to_tracker

    return factory


def _save_acceptance_counts(original: Function) -> Function:
    """The dev branch begins anew if the counts do not have the model's length: it gets theirs."""
    layers_of, with_layers = argument(original, "num_layers"), replacing(original, "num_layers")

    @functools.wraps(original)
    def _save_acceptance_counts(*args: Any, **kwargs: Any) -> Any:
        tracker = sys.modules[MTP.split(":")[0]].MTPLossLoggingHelper.tracker
        _grow(tracker, layers_of(args, kwargs))
        if (counts := tracker.get("acceptance_counts")) is not None:
            args, kwargs = with_layers(args, kwargs, counts.shape[-1])
        return original(*args, **kwargs)

    return _save_acceptance_counts


_of_mtp = _save(*MTP.rstrip(".").split(":"))
_of_dsa = _save(DSA.split(":")[0], "DSAIndexerLossLoggingHelper")

BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v0_12": {EXPERTS + ":save_to_aux_losses_tracker": _save_auxiliary_loss, MTP + "save_loss_to_tracker": _of_mtp},
    "v0_16": {
        EXPERTS + ":save_to_aux_losses_tracker": _save_auxiliary_loss,
        MTP + "save_loss_to_tracker": _of_mtp,
        DSA: _of_dsa,
    },
    "v0_18": {
        LOGGING + "record": _record,
        LOGGING + "ensure_initialized": _record,
        MTP + "save_loss_to_tracker": _of_mtp,
        DSA: _of_dsa,
    },
    "v0_19": {
        LOGGING + "record": _record,
        LOGGING + "ensure_initialized": _record,
        MTP + "save_metrics_to_tracker": _of_mtp,
        DSA: _of_dsa,
    },
    "v0_19_dev": {
        LOGGING + "record": _record,
        LOGGING + "ensure_initialized": _record,
        MTP + "save_loss_to_tracker": _of_mtp,
        MTP + "_save_acceptance_counts": _save_acceptance_counts,
    },
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
