"""fused-qkv-rope: the option stays on where the kernel rotates as the model says, and is put off aloud elsewhere."""

import logging

import pytest
import torch
from needed import needed

import shim
from shim import NotMetError, testing
from shim.patches.megatron_core.fused_qkv_rope.proof import error, losses

CELLS = {"0.19.2": "all"}

ID = "fused-qkv-rope"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


def applied():
    return shim.patched(only=[ID], require=[ID])


def model_of(**options):
    return testing.build_gpt(mtp_num_layers=None, **options)


def test_what_the_kernel_does_stays(caplog):
    stock = losses(True)
    with applied(), caplog.at_level(logging.WARNING, "shim"):
        assert torch.equal(losses(True), stock)
        assert model_of(fused_single_qkv_rope=True).config.fused_single_qkv_rope
    assert not [text for text in caplog.messages if ID in text]


def test_a_kernel_that_is_told_enough_is_right():
    """What the stand-in of proofs computes is what a layer without the option does."""
    assert error(False, {}) < 1e-5


def test_the_option_is_put_off_once_and_aloud(caplog):
    with applied(), caplog.at_level(logging.WARNING, "shim"):
        config = model_of(fused_single_qkv_rope=True, rotary_interleaved=True).config
    assert not config.fused_single_qkv_rope
    assert [text for text in caplog.messages if ID in text] == [
        "fused-qkv-rope: fused_single_qkv_rope is off, because it ignores rotary_interleaved"
    ]


def test_check_names_an_option_that_was_switched_on_later():
    with applied():
        model = model_of(rotary_interleaved=True)
        model.config.fused_single_qkv_rope = True
        with pytest.raises(NotMetError, match="ignores rotary_interleaved"):
            shim.check(model)
