"""Patches, one package per distribution and one module per patch; nothing runs at import."""
