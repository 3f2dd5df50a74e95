"""shim.config_override: a field of a config with another value around a call, and in the recompute of that call."""

from shim._config_override.override import config_override

__all__ = ["config_override"]
