"""Proof of mamba-norm-eps."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

WIDTH, EPSILON = 32, 1e-6


def build(norm: Any = None, epsilon: float = EPSILON, **overrides: Any) -> Any:
    """A MambaLayer with the identity in the place of its mixer, whose kernels need a GPU."""
    from megatron.core import parallel_state
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba = import_module("megatron.core.ssm.mamba_layer")
    config: Any = testing.build_gpt(mtp_num_layers=None, num_layers=1, hidden_size=WIDTH, **overrides).config
    config.layernorm_epsilon = epsilon
    parts = mamba.MambaLayerSubmodules(norm=norm or WrappedTorchNorm, mixer=IdentityOp, mamba_bda=IdentityFuncOp)
    groups = {"pg_collection", "model_comm_pgs"} & set(inspect.signature(mamba.MambaLayer.__init__).parameters)
    given = SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group())
    return mamba.MambaLayer(config, parts, **dict.fromkeys(groups, given))


def output_and_gradient(layer: Any, hidden: Tensor) -> Tensor:
    """Of a layer on hidden [s, b, h], and the gradient of hidden: [2, s, b, h]."""
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden, None)
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
    return torch.stack([output.detach(), gradient])


def error(normalization: str) -> float:
    hidden = 1e-3 * torch.randn(4, 1, WIDTH, generator=torch.Generator().manual_seed(0))
    found = output_and_gradient(build(normalization=normalization), hidden)
    norm = getattr(torch.nn, normalization)(WIDTH, eps=EPSILON)
    right = output_and_gradient(lambda states, mask: norm(states), hidden)
    return float((found - right).norm() / right.norm())


@proof("normed states or their gradients off by {:.1e}", bound=1e-6)
def the_norm_of_a_mamba_layer_has_the_epsilon_of_its_config(here: Here) -> float:
    """The norm in front of a Mamba mixer ignores `layernorm_epsilon`.

    To reproduce: build a MambaLayer with `MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=IdentityOp,
    mamba_bda=IdentityFuncOp)` and `layernorm_epsilon=1e-6`. Give it small states, and compare with the norm of torch
    with that epsilon.

    MambaLayer builds its norm from the config and the width, without the epsilon, so it has the default 1e-5. Small
    states come out too small. Right is the epsilon of the config, as in every TransformerLayer. Seen in 0.12 to 0.18;
    0.19 passes it.

    The identity stands in for the mixer, whose kernels need a GPU.
    """
    return max(here.run(error, kind)[0] for kind in ("LayerNorm", "RMSNorm"))
