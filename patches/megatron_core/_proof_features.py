"""For proofs: whether megatron-core has the feature that a patch is about."""

from importlib import import_module

from shim.testing.proof import LacksFeatureError


def need_option(name: str, feature: str, config: str = "transformer.transformer_config:TransformerConfig") -> None:
    """LacksFeatureError if this config has no such option.

    An option says more than a module: upstream moves modules, and then the feature is still there.
    """
    module, _, qualname = config.partition(":")
    if name not in getattr(import_module(f"megatron.core.{module}"), qualname).__dataclass_fields__:
        raise LacksFeatureError(f"this release has no {feature}")
