"""For proofs: whether megatron-core has the feature that a patch is about."""

import inspect
from importlib import import_module

from shim.testing.proof import LacksFeatureError


def need_option(name: str, feature: str, config: str = "transformer.transformer_config:TransformerConfig") -> None:
    """LacksFeatureError if this config has no such option.

    An option says more than a module: upstream moves modules, and then the feature is still there.
    """
    module, _, qualname = config.partition(":")
    if name not in getattr(import_module(f"megatron.core.{module}"), qualname).__dataclass_fields__:
        raise LacksFeatureError(f"this release has no {feature}")


def takes_padding_mask() -> bool:
    """Whether a GPTModel is called with a padding mask: from 0.16 on."""
    from megatron.core.models.gpt import GPTModel

    return "padding_mask" in inspect.signature(GPTModel.forward).parameters


def need_padding_mask() -> None:
    """LacksFeatureError if it is not."""
    if not takes_padding_mask():
        raise LacksFeatureError("models of this release take no padding mask")
