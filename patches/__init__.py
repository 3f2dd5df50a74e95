"""Patches, one package per distribution and one module or folder per patch; nothing runs at import."""
