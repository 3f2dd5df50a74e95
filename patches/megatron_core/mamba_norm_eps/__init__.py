"""The epsilon of the norm in front of a Mamba mixer.

What is wrong (0.12 to 0.18): MambaLayer builds its norm without the config's layernorm_epsilon, so it has the default
of the norm's class, 1e-5. A model with another epsilon, such as 1e-6, computes something else than its config says, and
than it was pretrained with elsewhere. Only specs with a separate norm in MambaLayer meet this: in upstream's specs for
Transformer Engine the norm is part of the mixer's first projection, and gets the config's.

The patch: when a MambaLayer is built, its norm gets the config's epsilon. All norms that upstream can build read theirs
in each forward. A layer that was built before the patch was applied keeps its own; shim.check(model) says so.

A model that was trained without the patch was trained with the other epsilon. To go on with that, put 1e-5 into the
config.

Upstream: Megatron-LM pull request 5750, in 0.19.

Delete when: 0.19 is the oldest supported release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function

TARGET = "megatron.core.ssm.mamba_layer:MambaLayer.__init__"


def _init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        layer = args[0]
        if _differs(layer):
            layer.norm.eps = layer.config.layernorm_epsilon

    return __init__


def _differs(layer: Any) -> bool:
    """Whether the norm of a layer has another epsilon than the config. IdentityOp has none.

    Somebody's class of the name MambaLayer may have neither.
    """
    epsilon = getattr(getattr(layer, "config", None), "layernorm_epsilon", None)
    return epsilon is not None and bool(getattr(getattr(layer, "norm", None), "eps", epsilon) != epsilon)


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """See docs/patch-modules.md."""
    for model in models:
        for name, module in model.named_modules():
            if any(kind.__name__ == "MambaLayer" for kind in type(module).__mro__) and _differs(module):
                what = f"the norm of {name or 'the layer'} has the epsilon {module.norm.eps}"
                says = module.config.layernorm_epsilon
                yield f"{what}, and its config says {says}", "call shim.apply() before the model is built"
                return


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TARGET: _init}
