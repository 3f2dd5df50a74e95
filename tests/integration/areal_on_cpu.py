"""What AReaL needs beside bridge_on_cpu: its own platform of a CPU, and what is not called: servers and loggers."""

import absent
import bridge_on_cpu  # noqa: F401  (AReaL imports Megatron-Bridge)
import torch
from bridge_finetunes import ON_CPU, set_all
from torch.overrides import TorchFunctionMode

absent.stand_in(
    "aiohttp",
    "areal.engine.sglang_remote",
    "areal.experimental.inference_service",
    "areal.experimental.openai",
    "areal.experimental.training_service",
    "areal.utils.stats_logger",
    "numba",
    "uvloop",
)


class _NumberMeansCpu(TorchFunctionMode):
    """AReaL makes its device of the number of a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device and type(args[0]) is int:
            args = ("cpu",)
        return func(*args, **(kwargs or {}))


def use():
    """AReaL's platform of a CPU, where it would take one of a GPU, because torch says that there is one.

    Its engine leaves these options of a model to Megatron-Bridge, which turns on what has a kernel.
    """
    from areal.infra import platforms
    from areal.infra.platforms.cpu import CpuPlatform
    from megatron.bridge import AutoBridge

    platforms.current_platform._platform = CpuPlatform()
    platforms.current_platform._initialized = True
    _NumberMeansCpu().__enter__()
    provider_of = AutoBridge.to_megatron_provider

    def provider_on_cpu(*arguments, **options):
        provider = provider_of(*arguments, **options)
        set_all(provider, ON_CPU)
        return provider

    AutoBridge.to_megatron_provider = provider_on_cpu
