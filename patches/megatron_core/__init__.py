"""Patches of megatron-core."""
