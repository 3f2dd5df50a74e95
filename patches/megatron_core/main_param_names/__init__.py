"""Main parameters that are taken from a checkpoint, by the names of the parameters.

What is wrong (0.14 to 0.16): `reload_model_params(state_dict)` gives the distributed optimizer main parameters in the
precision of a checkpoint, instead of those of bf16 weights. It looks for each parameter's name anywhere in the keys of
the checkpoint. The name of weight1 is a part of the keys of weight1 and weight10. So from 11 local experts of
TEGroupedMLP on it raises "AssertionError: Parameter ... has 2 matches in state dict". A trainer that starts from
weights alone meets it with load_main_params_from_ckpt. Without that, training starts from rounded weights.

The patch makes a key match if it ends with the name. Keys of which none begins another one go to stock as they are.

Upstream: fixed by pull request 3569, in 0.17.

Delete when: releases before 0.17 are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from shim.patches._arguments import Function, argument, replacing

BUILD_MAP = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_param_to_state_dict_param_map"


class _Key(str):
    """A key of a checkpoint, of which `name in key` says whether it ends with the name."""

    __slots__ = ()
    __contains__ = str.endswith


def _build_model_param_to_state_dict_param_map(original: Function) -> Function:
    state_of, with_state = argument(original, "state_dict"), replacing(original, "state_dict")

    @functools.wraps(original)
    def _build_model_param_to_state_dict_param_map(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_state(args, kwargs, _told_apart(state_of(args, kwargs)))
        return original(*args, **kwargs)

    return _build_model_param_to_state_dict_param_map


def _told_apart(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """With other keys where stock needs them. state: of a model, or of its chunks by "model", "model0" or "model_0"."""
    chunks = {key: _told_apart(of) for key, of in state.items() if key.startswith("model") and isinstance(of, Mapping)}
    if chunks:
        return {**state, **chunks}
    if not any(key.startswith(other) for other, key in pairwise(sorted(state))):
        return state
    return {_Key(key): value for key, value in state.items()}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {BUILD_MAP: _build_model_param_to_state_dict_param_map}
