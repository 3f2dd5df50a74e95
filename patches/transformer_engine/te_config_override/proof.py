"""Proof of te-config-override."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from shim.patches._proof_config_override import overridden
from shim.testing.proof import Here, proof

FORWARD, AFTERWARDS = 5.0, 3.0


def gradient(checkpoint: Callable[..., Tensor] | None) -> Tensor:
    """Of factor * x**2 [8], whose factor is FORWARD around the forward pass and AFTERWARDS in backward."""
    config = SimpleNamespace(factor=AFTERWARDS)
    values = torch.linspace(-1, 1, 8).requires_grad_()
    function = lambda given: config.factor * given * given  # noqa: E731
    with overridden(config, factor=FORWARD):
        result = checkpoint(function, values) if checkpoint else function(values)
    result.sum().backward()
    assert values.grad is not None
    return values.grad


@proof("gradient off by {:.1e}", right="bit-equal", defect="missing", te=True, beside=("config-override",))
def a_recompute_sees_the_config_of_its_forward_pass(here: Here) -> float:
    """A config field that is set around a call has its other value in the recompute by Transformer Engine's checkpoint.

    To reproduce: run `factor * x * x`, where factor is read from a config, by `te.distributed.checkpoint`. Set the
    field to 5 before the call, restore it to 3 afterwards, and call backward.

    The recompute reads 3, and the gradient is silently that of another function. A trainer does this with megatron's
    te_checkpoint under FP8, to score with other settings than those it trains with, such as apply_rope_fusion=False.
    There is no way to say that a value belongs to the forward pass and to its recompute.

    Right is the gradient without the checkpoint, to the bit. From 2.1 on.
    """
    from transformer_engine.pytorch.distributed import checkpoint

    found, right = gradient(checkpoint), gradient(None)
    return float((found - right).norm() / right.norm())


@proof("gradient off by {:.1e}", right="bit-equal", defect="missing", te=True, beside=("config-override",))
def a_recompute_without_reentrance_sees_the_config_of_its_forward_pass(here: Here) -> float:
    """A config field that is set around a call has its other value in a recompute with `use_reentrant=False`.

    To reproduce: run the other proof with `te.distributed.checkpoint(..., use_reentrant=False)`, which keeps the
    function in hooks on saved tensors. Right is the gradient without the checkpoint, to the bit. From 2.1 on.
    """
    from transformer_engine.pytorch.distributed import checkpoint

    found, right = gradient(functools.partial(checkpoint, use_reentrant=False)), gradient(None)
    return float((found - right).norm() / right.norm())
