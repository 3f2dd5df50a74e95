"""Each set of frozen parameters of Transformer Engine's LayerNormMLP and fused operations, against all trained.

The table says what was tried: as the layers of LoRA's base (weights frozen), of bias-only tuning, of multi-token
prediction behind a frozen decoder (no gradient of the input), in recompute, and frozen anew from step to step.
"""

import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shim
from shim.patches.transformer_engine._proof_linear_layers import EPS, INPUTS, ROWS, kernels, layer_of, rows_of
from shim.testing.transformer_engine import compiled_ops

CELLS = {"0.19.2+2.20.2": "all"}
ABOUT = []

BIASES = "te-frozen-weight-bias"  # without it LayerNormMLP loses fc2_bias
FFN = 48
TABLE = [  # the layer, whether its input requires a gradient, whether it is recomputed
    (kind, behind, recomputed)
    for kind in ("LayerNormMLP", "norm, biases, ReLU", "RMSNorm, SwiGLU", "RMSNorm, biases, SwiGLU")
    for behind, recomputed in ((True, False), (False, False), (True, True))
]


def rmsnorm_fwd(rows, weight, *more):
    rows = rows_of(rows)
    scale = (rows.square().mean(-1) + EPS).rsqrt()
    return rows * scale[:, None] * weight.detach(), None, scale


def rmsnorm_bwd(of_output, rows, scale, weight, *more):
    normed, of_normed = rows_of(rows) * scale[:, None], rows_of(of_output) * weight.detach()
    of_rows = of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)
    return of_rows * scale[:, None], (rows_of(of_output) * normed).sum(0)


def gated(rows):
    gate, value = rows.chunk(2, -1)
    return functional.silu(gate) * value


def dswiglu(of_output, rows, *more):
    with torch.enable_grad():
        rows = rows_of(rows).requires_grad_()
        return torch.autograd.grad(gated(rows), rows, rows_of(of_output))[0]


MORE = {
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "swiglu": lambda rows, *more: gated(rows_of(rows)),
    "dswiglu": dswiglu,
}


@pytest.fixture
def te():
    with kernels() as te, compiled_ops(MORE), shim.patched(only=[BIASES], require=[BIASES]):
        yield te


def layer(te, kind):
    if kind == "LayerNormMLP":
        made = layer_of(te, kind)
    else:
        ops, how = te.ops, {"device": "cpu", "dtype": torch.float32}
        bias = "biases" in kind
        up, activation = (2 * FFN, ops.SwiGLU()) if "SwiGLU" in kind else (FFN, ops.ReLU())
        norm = (ops.RMSNorm if "RMS" in kind else ops.LayerNorm)(INPUTS, **how)
        linears = [ops.Linear(*sizes, bias=bias, **how) for sizes in ((INPUTS, up), (FFN, INPUTS))]
        made = ops.Sequential(norm, linears[0], activation, linears[1])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def gradients(made, frozen=(), behind=True, recomputed=False):
    """behind: something in front of the layer is trained, too."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(ROWS), INPUTS, generator=generator).requires_grad_(behind)
    for name, parameter in made.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name not in frozen)
    output = checkpoint(made, rows, use_reentrant=False) if recomputed else made(rows)
    output.backward(torch.randn(output.shape, generator=generator))
    found = {"rows": rows.grad, **{name: parameter.grad for name, parameter in made.named_parameters()}}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(("kind", "behind", "recomputed"), TABLE)
def test_each_set_of_frozen_parameters(te, kind, behind, recomputed):
    made = layer(te, kind)
    truth = gradients(made)
    names = [name for name in truth if name != "rows"]
    for count in range(len(names)):
        for frozen in itertools.combinations(names, count):
            right = set(truth) - set(frozen) - (set() if behind else {"rows"})
            found = gradients(made, frozen, behind, recomputed)
            assert set(found) == right, (frozen, sorted(right ^ set(found)))
            assert all(torch.allclose(found[name], truth[name], rtol=1e-5, atol=1e-4) for name in right), frozen
