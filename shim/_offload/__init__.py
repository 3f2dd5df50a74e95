"""Memory given back between training and rollout: optimizer states, main weights, gradients and weights, on the host.

A storage is freed by a resize to nothing, and made again by one to its size. So every tensor stays the object that it
is, and every view a view: parameters, shards of them, main_grad, buckets, tied weights. found.py looks at what models
and optimizer hold, whatever their classes.
"""

from __future__ import annotations

from shim._offload.handle import Left, Offloaded, offload

__all__ = ["Left", "Offloaded", "offload"]
