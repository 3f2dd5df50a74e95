"""Fast paths that ignore a setting: their options are put off in the config of a layer that is built.

`Ignored` tells of a config which options choose such a path, each with what the path would ignore, in words. It is also
asked of configs that lack the fields.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

_log = logging.getLogger("shim")

Ignored = Callable[[Any], Mapping[str, str]]


def put_off(id: str, ignored: Ignored) -> Callable[[Function], Function]:
    """The factory for the `__init__` of a layer with an argument `config`. It says what it puts off."""

    def factory(original: Function) -> Function:
        config_of = argument(original, "config")

        @functools.wraps(original)
        def __init__(*args: Any, **kwargs: Any) -> None:
            config = config_of(args, kwargs)
            for option, what in ignored(config).items():
                setattr(config, option, False)
                _log.warning("%s: %s is off, because it ignores %s", id, option, what)
            original(*args, **kwargs)

        return __init__

    return factory


def problems_of(models: Iterable[Any], ignored: Ignored) -> Iterator[tuple[str, str]]:
    """What keeps such a patch from its effect: an option that was switched on after the layer was built."""
    for model in models:
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        for option, what in (found for config in configs.values() for found in ignored(config).items()):
            yield (
                f"{option} of a layer's config is on, and ignores {what}",
                "call shim.apply() before the model is built, and leave the field off",
            )
