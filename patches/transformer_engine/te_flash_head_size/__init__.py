"""FlashAttention 2 runs heads of 200 to 256 on GPUs such as the B300.

What is wrong (2.1 to 2.20): get_attention_backend refuses FlashAttention 2 for heads above 192, unless the compute
capability is 8.0, 9.0, 10.0 or 12.0 to the digit. That of a B300 is 10.3. If cuDNN's attention cannot run such heads
either, attention is unfused, with memory quadratic in the length of a sequence; packed rows raise an error in releases
whose unfused attention does not take them.

The patch: get_attention_backend gets a compute capability of 10.x that also equals 10.0. It is compared for equality
with 10.0 nowhere but in this check: every other decision, and every other reader of the compute capability, sees the
true one. On other GPUs nothing changes. Which attention is preferred stays Transformer Engine's choice.

- 10.x alone. Transformer Engine asks for FlashAttention 2.7.3 there, whose kernels for 10.0 run on 10.x.
- 8.6, 8.9 and 12.1 stay refused. Their shared memory is too small for the backward of such heads with dropout:
  FlashAttention from 2.7.3 on runs no kernel then and says nothing.
- Transformer Engine remembers its choice. Apply before the first attention.

SkyRL compiles the function anew for this, on all GPUs that are not on the list. On 10.x it need not beside shim.

Upstream: pull request 2836 fixed it, 2629 brought it back before any release, 3360 is open.

Delete when: every supported release takes heads of 256 on compute capability 10.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

GETTERS = {
    "v2_0": "transformer_engine.pytorch.attention:get_device_compute_capability",
    "v2_2": "transformer_engine.pytorch.dot_product_attention.utils:get_device_compute_capability",
    "v2_3": "transformer_engine.pytorch.attention.dot_product_attention.utils:get_device_compute_capability",
}
KNOWN = (10, 0)


class LikeKnown(tuple[int, ...]):
    """A compute capability that also equals (10, 0). It is ordered by, and shows, what it is."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == KNOWN or tuple(self) == other

    __hash__ = tuple.__hash__


def _get_device_compute_capability(original: Function) -> Function:
    @functools.wraps(original)
    def get_device_compute_capability(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        found: tuple[int, ...] = original(*args, **kwargs)
        return LikeKnown(found) if found[0] == KNOWN[0] and found != KNOWN else found

    return get_device_compute_capability


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {GETTERS[variant]: _get_device_compute_capability}
