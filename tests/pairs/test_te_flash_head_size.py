"""te-flash-head-size: one check sees another compute capability; every other decision and reader sees the true one."""

import inspect
import operator
from importlib import import_module
from importlib.metadata import version
from unittest import mock

import pytest
import torch
from packaging.version import Version

import shim
from shim.patches.transformer_engine._proof_flash_attention import chosen, gpu, home
from shim.patches.transformer_engine.te_flash_head_size import LikeKnown
from shim.patches.transformer_engine.te_flash_head_size.proof import B300, takes_flash

CELLS = {"0.13.1+2.5.0": "all", "0.19.2+2.20.2": ["test_it_is_traced_as_on_stock"]}

ID = "te-flash-head-size"
NEEDED = shim.plan(rounding=True)[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), B300, (12, 0), (12, 1)]
LISTED = ((8, 0), (9, 0), (10, 0), (12, 0))  # by Transformer Engine
SIZES = [64, 128, 192, 200, 252, 256, 264]
CASES = {
    "plain": {},
    "packed": {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"},
    "dropout": {"attention_dropout": 0.1},
    "deterministic": {"deterministic": True},
    "window": {"window_size": (128, 0)},
    "inference": {"is_training": False},
    "context parallel": {"context_parallel": True},
}


def all_choices(flash):
    """By case, GPU and head size; fp32 stands for what FlashAttention never takes."""
    found = {}
    for name, case in {**CASES, "fp32": {"qkv_dtype": torch.float32}}.items():
        for capability in CAPABILITIES:
            for head in SIZES:
                sizes = {"head_dim_qk": head, "head_dim_v": head}
                found[name, capability, head] = chosen(capability, flash, **sizes, **case)
    return found


@needed
def test_nothing_but_these_heads_on_this_gpu_changes():
    stock = all_choices(flash=True)
    with shim.patched(only=[ID], require=[ID]):
        found = all_choices(flash=True)
    changed = {key for key in stock if found[key] != stock[key]}
    assert changed == {(name, B300, head) for name in CASES for head in (200, 256) if found[name, B300, head][0]}
    # What is chosen then is what a GPU of 10.0 gets.
    assert all(found[key] == stock[key[0], (10, 0), key[2]] for key in changed)
    assert {name for name, *_ in changed} >= {"plain", "packed", "dropout", "inference", "context parallel"}


@needed
def test_without_flash_attention_nothing_changes():
    stock = chosen(B300, False, head_dim_qk=256, head_dim_v=256)
    with shim.patched(only=[ID], require=[ID]):
        assert chosen(B300, False, head_dim_qk=256, head_dim_v=256) == stock


@needed
def test_what_is_preferred_stays_the_choice():
    """Where cuDNN's attention runs such heads, Transformer Engine takes it, as it does for smaller heads."""
    stock = chosen(B300, fused=True, head_dim_qk=256, head_dim_v=256)
    with shim.patched(only=[ID], require=[ID]):
        found = chosen(B300, fused=True, head_dim_qk=256, head_dim_v=256)
        smaller = chosen(B300, fused=True, head_dim_qk=128, head_dim_v=128)
    for flash, *_, fused, _backend, unfused, _available in (stock, found, smaller):
        assert (flash, fused, unfused) == (False, True, False)
    assert found[-1] == smaller[-1]  # of what could run, only FlashAttention is new
    assert (not stock[-1][0], stock[-1][1:]) == (found[-1][0], found[-1][1:])


@needed
def test_a_function_that_is_compiled_anew(monkeypatch):
    """As SkyRL does, unless it finds the GPU in the list: in both orders heads of 256 are taken."""
    module = home()
    with shim.patched(only=[ID], require=[ID]), gpu(B300):
        assert module.get_device_compute_capability() in LISTED
    monkeypatch.setattr(module, "get_attention_backend", module.get_attention_backend)  # put back behind the test
    source = inspect.getsource(module.get_attention_backend)
    exec(
        compile(source.replace(f"device_compute_capability not in {LISTED}", "False"), module.__file__, "exec"),
        vars(module),
    )
    assert takes_flash(256) and takes_flash(256, (8, 9))
    with shim.patched(only=[ID], require=[ID]):
        assert takes_flash(256) and takes_flash(256, (8, 9)) and not takes_flash(264)


@needed
def test_others_see_the_true_compute_capability():
    utils = import_module("transformer_engine.pytorch.utils")
    readers = [import_module("transformer_engine.pytorch.module.base"), import_module("transformer_engine.pytorch.fp8")]
    readers = [module for module in (utils, *readers) if hasattr(module, "get_device_compute_capability")]
    stock = home().get_device_compute_capability
    with shim.patched(only=[ID], require=[ID]), gpu(B300):
        assert home().get_device_compute_capability is not stock
        for module in readers:
            assert module.get_device_compute_capability is stock
            assert type(module.get_device_compute_capability()) is tuple
    for capability in CAPABILITIES:
        with shim.patched(only=[ID], require=[ID]), gpu(capability):
            found = home().get_device_compute_capability()
            assert (type(found) is LikeKnown) is (capability == B300)
            assert tuple(found) == capability


def test_it_differs_from_a_tuple_in_one_equality():
    others = [(major, minor) for major in range(7, 14) for minor in range(10)]
    for other in others:
        for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.ne):
            assert compare(LikeKnown(B300), other) is compare(B300, other), (compare, other)
            assert compare(other, LikeKnown(B300)) is compare(other, B300), (compare, other)
        equal = other in (B300, (10, 0))
        assert (LikeKnown(B300) == other) is (other == LikeKnown(B300)) is equal
    assert LikeKnown(B300) in LISTED
    assert LikeKnown(B300) not in ((8, 9), (12, 0))
    assert (str(LikeKnown(B300)), hash(LikeKnown(B300)), [*LikeKnown(B300)]) == (str(B300), hash(B300), [*B300])


@pytest.mark.skipif(Version(version("transformer-engine")) < Version("2.19"), reason="not traced before 2.19")
@needed
def test_it_is_traced_as_on_stock():
    """From 2.19 the choice is a part of a compiled graph."""
    module = home()
    params = module.AttentionParams(
        qkv_dtype=torch.bfloat16,
        head_dim_qk=256,
        head_dim_v=256,
        attn_mask_type="causal",
        core_attention_bias_shape=None,  # 2.19 has a shape by default, which FlashAttention does not take
    )

    def step(value):
        return value + 1 if module.get_attention_backend(params)[0] else value - 1

    # What is installed is asked of the device before the first warning, which needs the device's stand-in in the graph.
    warned = {name: True for name in vars(module.FlashAttentionUtils) if name.endswith("warning_printed")}

    def traced():
        with gpu(B300), mock.patch.multiple(module.FlashAttentionUtils, **warned):
            torch._dynamo.reset()
            found = torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1))
            torch._dynamo.reset()
        return found

    try:
        assert traced().item() == -1
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"this torch cannot trace it without shim either: {type(error).__name__}")
    with shim.patched(only=[ID], require=[ID]):
        found = traced()
    assert found.item() == 1
