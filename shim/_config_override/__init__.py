"""shim.config_override: other values for fields of a config around a call and in its recompute."""

from shim._config_override.override import config_override

__all__ = ["config_override"]
