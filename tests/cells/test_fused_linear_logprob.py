"""fused-linear-logprob: losses and gradients in every layout, what takes stock's way, and the bytes of a step."""

import pytest
import torch

import shim
from shim import testing

ID = "fused-linear-logprob"
SIZES = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32}


def patched(**options):
    return shim.patched(only=[ID], require=[ID], options={ID: {"fuse": True, **options}})


@pytest.fixture
def one_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        yield


def build(depths, tied, **options):
    return testing.build_gpt(mtp_num_layers=depths, share_embeddings_and_output_weights=tied, **SIZES | options)


def step(model):
    """Losses of each token and all gradients of a step on two rows."""
    rows = torch.stack([torch.arange(8), torch.arange(8) * 5 % 64])
    losses = model(rows, rows, None, labels=rows.roll(-1, 1))
    losses.mean().backward()
    return losses.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("depths", [None, 1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_gradients(depths, tied):
    stock, grads = step(build(depths, tied))
    with patched():
        print(shim.status()[ID])
        found, of_found = step(build(depths, tied))
    torch.testing.assert_close(found, stock)
    assert grads.keys() == of_found.keys()
    for name in grads:
        torch.testing.assert_close(of_found[name], grads[name])
