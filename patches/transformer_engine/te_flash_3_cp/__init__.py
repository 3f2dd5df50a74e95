"""FlashAttention 3 under context parallelism, without FlashAttention 2 and in each of its APIs.

What is wrong (2.2 to 2.15):

1. Context parallelism takes the output and the logarithms of sums of FlashAttention 3 from places that depend on the
   version of FlashAttention 2. If that is not installed, or older than 2.7, they are taken from places 4 and 5 of
   a tuple of 4: IndexError.
2. FlashAttention 3 takes window_size_left and window_size_right since July 2025, and is_causal in backward; before it
   took window_size, and causal. Transformer Engine passes the older names up to 2.13, and the newer ones from 2.14 on.
   With the other FlashAttention 3, context parallelism raises a TypeError.

The patch: the two functions that context parallelism takes from FlashAttention 3 stand behind adapters from the first
attention on that needs them. The results lie in both places, and arguments have the names that FlashAttention 3 takes.
No tensor is copied. FlashAttention 2, fused attention, and attention without context parallelism have other functions.
shim.revert() puts the functions back.

- Up to 2.14 cp_comm_type="all_gather" raises an AssertionError without FlashAttention 2. That stays.
- Transformer Engine 2.1 takes another FlashAttention 3, flashattn_hopper, which is left alone.

Upstream: pull request 2825 (in 2.16) fixed the first, 2704 (in 2.14) went over to the newer names. From 2.16 on
a FlashAttention 3 from before July 2025 stays refused by a TypeError.

Delete when: Transformer Engine 2.15 is not supported.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function, argument

PACKAGE = "transformer_engine.pytorch."
V2_3 = PACKAGE + "attention.dot_product_attention."
ENTRY = ":attn_forward_func_with_cp"
# The module of the target, and the module whose names of FlashAttention 3 context parallelism looks up at each step.
HOMES = {
    "v2_2": (PACKAGE + "attention", PACKAGE + "attention"),
    "v2_3": (V2_3 + "context_parallel", V2_3 + "backends"),
    "v2_14": (V2_3 + "context_parallel", V2_3 + "backends"),
}
FORWARD, BACKWARD = "_flash_attn_fwd_v3", "_flash_attn_bwd_v3"


def _names_of(function: Any) -> frozenset[str]:
    """The names that a function of FlashAttention 3 takes; none if it does not say them."""
    plain = getattr(function, "_init_fn", function)  # of an operator of torch.library, which takes any by itself
    try:
        parameters = inspect.signature(plain).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(parameter.name for parameter in parameters)


def renamed(kwargs: Mapping[str, Any], takes: frozenset[str]) -> dict[str, Any]:
    """These arguments by the names that a function takes. An argument without such a name stays as it is."""
    found = dict(kwargs)
    for old, new in (("causal", "is_causal"), ("is_causal", "causal")):
        if old in found and old not in takes and new in takes:
            found[new] = found.pop(old)
    sides = ("window_size_left", "window_size_right")
    if "window_size" in found and "window_size" not in takes and takes.issuperset(sides):
        found.update(zip(sides, found.pop("window_size"), strict=True))
    elif "window_size" in takes and not takes.intersection(sides) and all(side in found for side in sides):
        found["window_size"] = tuple(found.pop(side) for side in sides)
    return found


def in_both_places(found: Any) -> Any:
    """FlashAttention 3's results, also where those of FlashAttention 2 before 2.7 lie: the output 4th, the sums 5th."""
    if not isinstance(found, (tuple, list)) or not 2 <= len(found) <= 4:
        return found
    return (*found, *[None] * (4 - len(found)), found[0], found[1], None, None)


class Adapters:
    """The adapters in the place of FlashAttention 3's functions, from the first use to `release`."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._written: dict[str, tuple[Any, Function]] = {}  # by name: what was there, and the adapter

    def enter(self) -> None:
        """Put them there, unless they are there."""
        there = vars(sys.modules[self._home])
        with self._lock:
            for name, results in ((FORWARD, in_both_places), (BACKWARD, None)):
                function, (_, ours) = there.get(name), self._written.get(name, (None, None))
                if function is not None and function is not ours:
                    self._written[name] = function, _adapter(function, results)
                    there[name] = self._written[name][1]

    def held(self) -> str:
        return "adapters of FlashAttention 3 in context parallelism" if self._written else ""

    def release(self) -> None:
        """Put back what was there."""
        with self._lock:
            for name, (function, ours) in self._written.items():
                there = vars(sys.modules[self._home])
                if there.get(name) is ours:
                    there[name] = function
            self._written.clear()


def _adapter(function: Function, results: Callable[[Any], Any] | None) -> Function:
    takes = _names_of(function)

    @functools.wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **renamed(kwargs, takes))
        return found if results is None else results(found)

    return adapted


def _attn_forward_func_with_cp(original: Function, adapters: Adapters) -> Function:
    is_flash_3 = argument(original, "use_flash_attn_3")

    @functools.wraps(original)
    def attn_forward_func_with_cp(*args: Any, **kwargs: Any) -> Any:
        if is_flash_3(args, kwargs):
            adapters.enter()
        return original(*args, **kwargs)

    return attn_forward_func_with_cp


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    module, home = HOMES[variant]
    adapters = Adapters(home)
    factory = functools.partial(_attn_forward_func_with_cp, adapters=adapters)
    return Bindings({module + ENTRY: factory}, Resource(adapters.held, adapters.release))
