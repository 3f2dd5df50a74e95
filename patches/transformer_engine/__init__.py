"""Patches of Transformer Engine."""
