"""A module of Transformer Engine whose output shows the scale it ran with, on CPU.

The module is TransformerEngineBaseModule: when it takes scales, keeps them and gives them back is Transformer Engine's
own code. Its computation stands in for a GEMM, and for the kernel that writes amax down.
"""

from unittest import mock

import torch
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as manager
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from shim.testing.fp8_layer import fp8_region as region
from shim.testing.fp8_layer import fresh_fp8_state as clean_state

__all__ = ["OnGpu", "Scaled", "clean_state", "delayed", "manager", "queued", "region"]


class OnGpu(torch.Tensor):
    """What the module asks of its input."""

    is_cuda = True


class Scaled(TransformerEngineBaseModule):
    """output = input * weight * scale; the gradient of the input is then the scale that the recompute had."""

    def __init__(self):
        with mock.patch("torch.cuda.is_available", lambda: True):
            super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def _get_weight_tensors(self):
        return [self.weight]

    def _get_weight_quantizers(self):
        return [None]

    def _get_quantizers(self, *args):
        return ()

    def forward(self, values):
        ready = getattr(self, "prepare_forward_ctx", self.prepare_forward)
        with ready(values.as_subclass(OnGpu), num_gemms=1) as given:
            given = given.as_subclass(torch.Tensor)
            if not self.fp8:
                return given * self.weight
            state = self.fp8_meta["scaling_fwd"]
            state.amax_history[0] = torch.maximum(state.amax_history[0], given.detach().abs().max())
            return given * self.weight * state.scale[0].clone()

    @property
    def state(self):
        """Scale and amax history, now."""
        return self.fp8_meta["scaling_fwd"].scale.clone(), self.fp8_meta["scaling_fwd"].amax_history.clone()


def delayed(length=4):
    """A recipe whose scale is the largest amax of the last regions, by torch: the kernel for it is compiled."""
    return recipes.DelayedScaling(
        amax_history_len=length,
        amax_compute_algo=lambda history: history.max(dim=0).values,
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: torch.where(amax > 0, amax, scale),
    )


def queued():
    """How many entries Transformer Engine's queues hold."""
    queues = getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer
    return sum(map(len, queues)) + len(distributed.activation_recompute_forward._is_first_fp8_module)
