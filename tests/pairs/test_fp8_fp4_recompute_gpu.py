"""The proofs of fp8-fp4-recompute for a GPU, with layers that round as FP8 does instead of real kernels."""

import pytest
import torch
import transformer_engine.pytorch as te

import shim
from shim.patches.megatron_core.fp8_fp4_recompute import gpu_proof as fp8_fp4_recompute_gpu_proof
from shim.testing.fp8 import state_manager
from shim.testing.proof import Here, Proof, measure

CELLS = {"0.12.0+2.3.0": "all"}

ID = "fp8-fp4-recompute"
PROOFS = {value.name: value for value in vars(fp8_fp4_recompute_gpu_proof).values() if isinstance(value, Proof)}


class Layer(torch.nn.Linear):
    def __init__(self, inputs, outputs, params_dtype, device):
        super().__init__(inputs, outputs, dtype=params_dtype, device=device)

    def forward(self, values):
        if state_manager().is_fp8_enabled():
            values = values + (values.to(torch.float8_e4m3fn).to(values.dtype) - values).detach()
        return super().forward(values)


@pytest.mark.parametrize("name", PROOFS)
def test_the_proof_measures_what_it_says(name, monkeypatch):
    """Stock gives other gradients, and the patch every bit, where there is this recipe."""
    monkeypatch.setattr(te, "Linear", Layer)
    monkeypatch.setattr(te, "LayerNormLinear", Layer)
    stock = measure(PROOFS[name], Here("cuda"))
    if stock.state == "cannot run":
        pytest.skip(stock.text)
    assert stock.state == "wrong" and stock.value == 14, stock
    with shim.patched(only=[ID], require=[ID]):
        assert measure(PROOFS[name], Here("cuda")).text == "bit-equal"
