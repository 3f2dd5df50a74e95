"""A cp_comm_type for each layer.

What is wrong (0.12 to 0.16): `cp_comm_type` may be a list with the way of communication for each layer under context
parallelism. TransformerLayer takes the entry at its layer number, which counts from one. So each layer gets what the
next one was to have, and the last layer raises an IndexError. No model with such a list can be built.

What the patch does: a layer takes its own entry. The number is that among all layers of the model, on every pipeline
stage and virtual stage. The list has no entries for multi-token prediction. In 0.16 its depths are numbered behind the
layers, and take the entries from the first on, as they do from 0.17 on. Up to 0.15 they have no number, and take the
entry of the first layer of their stage. A list that has not one entry for each layer stays as it is: a config refuses
it, so it was put there later, with an entry in front. The list of the config is the same before, after, and for
everything that a layer builds.

Upstream: fixed in 0.17 by pull request 3389.

Delete when: releases before 0.17 are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

INIT = "megatron.core.transformer.transformer_layer:TransformerLayer.__init__"


class _ByNumber(list[Any]):
    """What a config has for its list until a layer has taken its entry, by a number that counts from one."""

    def __init__(self, config: Any, layer: Any) -> None:
        super().__init__(config.cp_comm_type)
        self._config, self._kinds, self._layer = config, config.cp_comm_type, layer

    def __getitem__(self, number: Any) -> Any:
        self.leave()
        if number != self._layer.layer_number:
            return self._kinds[number]  # upstream has counted by itself
        # Multi-token prediction is numbered behind the layers.
        return self._kinds[number - 1 if number <= len(self._kinds) else number - 1 - len(self._kinds)]

    def leave(self) -> None:
        """Give the config its own list back."""
        if self._config.cp_comm_type is self:
            self._config.cp_comm_type = self._kinds


def _init(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        config = config_of(args, kwargs)
        kinds = config.cp_comm_type if config.context_parallel_size > 1 else None
        if not isinstance(kinds, list) or len(kinds) != config.num_layers:
            original(*args, **kwargs)
            return
        config.cp_comm_type = by_number = _ByNumber(config, args[0])
        try:
            original(*args, **kwargs)
        finally:
            by_number.leave()

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: _init}
