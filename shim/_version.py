"""The version of shim. setup.py reads it as text."""

__version__ = "0.1.0"
