"""Algorithms on tensors, usable without megatron: packed roll."""

from shim.ops.packed_roll import continues_mask, packed_roll, roll_with, valid_mask

__all__ = ["continues_mask", "packed_roll", "roll_with", "valid_mask"]
