"""te-cu-seqlens-cache: offsets fit the device and the mode of a call, and are stock's own if those fit."""

import sys
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

import shim
from shim.patches.transformer_engine.te_cu_seqlens_cache import BINDINGS
from shim.patches.transformer_engine.te_cu_seqlens_cache.proof import fused_attention

CELLS = {"0.12.0+2.3.0": "all"}

ID = "te-cu-seqlens-cache"
PLAN = shim.plan()[ID]
TARGETS = {target.rpartition(":")[2].lstrip("_"): target for target in BINDINGS[PLAN.variant]}
FULL, SHARES = "get_full_cu_seqlens", "get_cu_seqlens_info_with_cp"
BOTH = [pytest.param(name, marks=pytest.mark.skipif(name not in TARGETS, reason="not here")) for name in (FULL, SHARES)]
CPU, META = torch.device("cpu"), torch.device("meta")
SHAPES = [(1, 8), (2, 8), (2, 16), (3, 4096)]


@pytest.fixture(autouse=True)
def nothing_is_cached():
    with fused_attention():
        pass  # the modules are loaded
    for target in TARGETS.values():
        module = vars(sys.modules[target.partition(":")[0]])
        for name in ("_cu_seqlens_cache", "_cu_seqlens_info_with_cp_cache"):
            module.get(name, {}).clear()


def offsets(name, batch_size=2, length=8, device=CPU):
    """What this function of Transformer Engine returns, in a list. Shares are those of two ranks."""
    module, _, function = TARGETS[name].partition(":")
    call = getattr(sys.modules[module], function)
    if name == FULL:
        return [call(batch_size, length, device)]
    return [*call(batch_size, length, 2, torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length)]


def can_be_saved(tensors):
    """Whether autograd can save these tensors."""
    weight = torch.ones((), requires_grad=True)
    try:
        return all((weight * tensor).requires_grad for tensor in tensors)
    except RuntimeError:
        return False


def same(found, others):
    return all(one is other for one, other in zip(found, others, strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_offsets_that_fit_are_stocks_own(name):
    stock = [offsets(name, *shape) for shape in SHAPES]
    with shim.patched(only=[ID], require=[ID]):
        assert all(same(offsets(name, *shape), kept) for shape, kept in zip(SHAPES, stock, strict=True))
        with torch.inference_mode():  # which takes the tensors of a training
            assert all(same(offsets(name, *shape), kept) for shape, kept in zip(SHAPES, stock, strict=True))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("before", [True, False], ids=["evaluated before shim", "evaluated under shim"])
def test_autograd_can_save_them_after_an_evaluation(name, before):
    with torch.inference_mode():
        stock = [offsets(name, *shape) for shape in SHAPES] if before else []
    if before:
        assert not any(can_be_saved(offsets(name, *shape)) for shape in SHAPES)
    with shim.patched(only=[ID], require=[ID]):
        with torch.inference_mode():
            evaluated = [offsets(name, *shape) for shape in SHAPES]
        assert not before or all(map(same, evaluated, stock))
        trained = [offsets(name, *shape) for shape in SHAPES]
        assert all(map(can_be_saved, trained))
        for found, kept in zip(trained, evaluated, strict=True):
            assert [(each.tolist(), each.dtype) for each in found] == [(each.tolist(), each.dtype) for each in kept]
        # They are made once, and the next evaluation makes none.
        assert all(same(offsets(name, *shape), found) for shape, found in zip(SHAPES, trained, strict=True))
        with torch.inference_mode():
            assert all(same(offsets(name, *shape), kept) for shape, kept in zip(SHAPES, evaluated, strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_they_lie_on_the_device_of_the_call(name):
    """The meta device stands for a second GPU."""
    first = offsets(name)
    if name == SHARES or Version(version("transformer-engine")) < Version("2.16"):
        assert offsets(name, device=META)[0].device == CPU
    with shim.patched(only=[ID], require=[ID]):
        other = offsets(name, device=META)
        assert {each.device for each in other} == {META}
        assert [each.shape for each in other] == [each.shape for each in first]
        assert same(offsets(name, device=META), other)
        with torch.inference_mode():
            assert {each.device for each in offsets(name, 5, device=META)} == {META}
            assert {each.device for each in offsets(name, 5)} == {CPU}
        for device in (CPU, META):
            found = offsets(name, 5, device=device)
            assert {each.device for each in found} == {device}
            assert can_be_saved(found) or device == META
        assert same(offsets(name), first)


@pytest.mark.parametrize("name", BOTH)
def test_arguments_by_name(name):
    module, _, function = TARGETS[name].partition(":")
    rest = {"device": CPU} if name == FULL else {"cp_size": 2, "cu_seqlens": torch.tensor([0, 8, 16])}
    with shim.patched(only=[ID], require=[ID]):
        call = getattr(sys.modules[module], function)
        with torch.inference_mode():
            call(max_seqlen=8, batch_size=2, **rest)
        found = call(max_seqlen=8, batch_size=2, **rest)
    assert can_be_saved([found] if name == FULL else found)


@pytest.mark.skipif(FULL not in TARGETS, reason="not here")
def test_a_device_without_a_number_is_that_of_stock():
    with shim.patched(only=[ID], require=[ID]):
        found = offsets(FULL)
        assert same(offsets(FULL, device="cpu"), found)
