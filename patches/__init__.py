"""Patches: one package per distribution, one module or folder per patch. A patch runs no code at import."""
