"""Memory given back between training and rollout: optimizer, main weights, gradients and weights, on the host."""

from shim._offload.handle import Left, Offloaded, offload

__all__ = ["Left", "Offloaded", "offload"]
