"""packed-equals-alone where kernels round: what rounding moves is right, and a defect is still wrong.

A GPU is pretended: the model and the row stay on the CPU, and products take their inputs in TF32.
"""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shim
from shim import testing
from shim.testing import generic, user_model
from shim.testing.proof import Here, measure

CELLS = {"0.13.1": "all", "0.19.2": "all"}

NEEDED = shim.plan()["mtp-packed-sequences"].wanted
build = functools.partial(testing.build_gpt, mtp_num_layers=1)
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def in_tf32(value):
    """fp32 rounded to the ten bits that TF32 has behind the point, to nearest even."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def product(left, right):
    """[..., m, k] times [..., k, n] by a kernel that is chosen by the shape: each sums in an order of its own."""
    size = 2 + left.size(-2) % 5
    pieces = zip(left.split(size, -1), right.split(size, -2), strict=True)
    return functools.reduce(torch.add, (one @ other for one, other in pieces))


class TF32(TorchDispatchMode):
    """Products as Transformer Engine's, which takes the inputs of a product in fp32 so."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            made = product(*map(in_tf32, args[-2:]))
            return made if len(args) == 2 else made + args[0]
        return function(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch):
    """What a proof on "cuda" does to the model and the row does nothing. Its weights are in fp32."""
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module, device=None: module)
    monkeypatch.setattr(user_model, "moved", lambda row, device: row)


def found(**options):
    (proof,) = [each for each in testing.generic_proofs(functools.partial(build, **options)) if each.name == NAME]
    return measure(proof, Here(device="cuda"))


NAME = "packed-equals-alone"


def test_tf32_is_what_it_is():
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12])
    assert in_tf32(values).tolist() == [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, 1.0]


@pytest.mark.usefixtures("gpu")
def test_what_rounding_moves_is_right():
    """Bits that are lost in products are no defect; with exact products the bound stays that of fp32."""
    with shim.patched(), TF32():
        rounded = found()
    with shim.patched():
        exact = found()
    assert (rounded.state, exact.state) == ("right", "right"), (rounded, exact)
    assert rounded.value > generic.EXACT and "may be rounding" in rounded.text
    assert exact.value <= generic.EXACT and "may be rounding" not in exact.text


@pytest.mark.skipif(not NEEDED, reason="this release is right")
@pytest.mark.usefixtures("gpu")
def test_a_defect_is_no_rounding():
    """Stock's gradients of multi-token prediction are wrong, or it takes no packed rows."""
    with TF32():
        assert found().state == "wrong"


@pytest.mark.usefixtures("gpu")
def test_so_much_rounding_that_it_would_hide_a_defect(monkeypatch):
    monkeypatch.setattr(generic, "HIDES", 1e-9)
    with shim.patched(), TF32():
        side = found()
    assert side.state == "cannot run" and "would hide a defect" in side.text


@pytest.mark.usefixtures("gpu")
def test_no_kernel_for_packed_rows_in_float32(monkeypatch):
    """Transformer Engine has none, on any GPU. That is no defect of the model, so both sides say that it cannot run."""

    def refusing(*args, **kwargs):
        raise ValueError("No dot product attention backend is available for the provided inputs.")

    with shim.patched():
        monkeypatch.setattr(user_model, "run_packed", refusing)
        side = found()
    assert side.state == "cannot run" and "float32" in side.text
