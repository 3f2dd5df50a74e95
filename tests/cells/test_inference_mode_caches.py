"""inference-mode-caches: autograd can save what megatron-core keeps by shape, at the cost of stock."""

import functools
import inspect
import sys
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

import shim
from shim import testing
from shim.patches.megatron_core.inference_mode_caches import BINDINGS, CACHE, HEADS, MASK, YARN, _kept, _made_outside
from shim.patches.megatron_core.inference_mode_caches.proof import CRASH, FULL, gradients

ID = "inference-mode-caches"
REFUSED = CRASH.partition(" ")[2]
VARIANT = shim.plan()[ID].variant
MINOR = tuple(int(part) for part in testing.release().split(".")[:2])
TARGETS = BINDINGS[VARIANT]
applied = functools.partial(shim.patched, only=[ID], require=[ID])


@pytest.fixture(autouse=True)
def one_rank():
    with testing.layout_initialised(testing.Layout()):
        yield


def rope():
    return rotary_pos_embedding.RotaryEmbedding(8, 1.0)


def yarn():
    return yarn_rotary_pos_embedding.YarnRotaryEmbedding(8, original_max_position_embeddings=8)


def cached_function(target):
    """A call that makes what this target keeps, and the object with the cache."""
    if target == MASK:
        function = sys.modules["megatron.core.transformer.utils"].get_default_causal_mask
        return functools.partial(function, 8), function
    if target == HEADS:
        from megatron.core.ssm.gated_delta_net import common, gdn

        user = gdn if MINOR < (0, 20) else common
        function = user._build_head_perm_for_split_sections
        return functools.partial(function, (4, 4), 2, torch.device("cpu")), function
    module = yarn() if target.startswith(YARN) else rope()
    return functools.partial(module, 16), type(module).forward


def tensor(found):
    return found[0] if isinstance(found, tuple) else found


cached = pytest.mark.parametrize("target", [target for target in TARGETS if TARGETS[target] is _kept])


@cached
def test_both_modes_share_what_is_kept(target):
    call, _ = cached_function(target)
    stock = tensor(call())
    with applied():
        call, owner = cached_function(target)
        owner.cache_clear()
        with torch.inference_mode():
            first = tensor(call())
            assert torch.is_inference_mode_enabled()
            assert tensor(call()) is first
        assert tensor(call()) is first
        assert not first.is_inference() and not first.requires_grad
        assert first.dtype == stock.dtype and torch.equal(first, stock)
        assert owner.cache_info().currsize == owner.cache_info().misses == 1
        owner.cache_clear()
        assert owner.cache_info().currsize == 0
        assert tensor(call()) is not first


@cached
def test_the_cache_is_a_cache_as_stocks_own(target):
    _, stock = cached_function(target)
    with applied():
        call, mine = cached_function(target)
        assert isinstance(stock, CACHE) and isinstance(mine, CACHE) and mine is not stock
        assert mine.cache_parameters() == stock.cache_parameters()
        assert inspect.signature(mine) == inspect.signature(stock)
        assert inspect.unwrap(mine) is inspect.unwrap(stock)
        call()
        # A call that finds its tensor runs no Python.
        with mock.patch.object(torch, "is_inference_mode_enabled", side_effect=AssertionError):
            call()
    assert cached_function(target)[1] is stock


@cached
def test_what_was_kept_before_is_not_returned(target):
    """shim may come after an evaluation."""
    call, owner = cached_function(target)
    with torch.inference_mode():
        assert tensor(call()).is_inference()
    with applied():
        assert owner.cache_info().currsize == 0
        if isinstance(call.func, torch.nn.Module):
            assert not tensor(call()).is_inference()
        assert not tensor(cached_function(target)[0]()).is_inference()


def test_marks_of_a_cache_stay():
    @functools.lru_cache(maxsize=3)
    def table():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    table.mark = "of a decorator"
    mine = _kept(table)
    assert mine.mark == "of a decorator" and mine.cache_info().maxsize == 3
    with torch.inference_mode():
        assert mine() == (False, False)  # a table has no graph


def test_after_an_exception_inside_nothing_is_kept_and_the_mode_is_as_before():
    with applied():
        module = rope()
        type(module).forward.cache_clear()
        with torch.inference_mode():
            with mock.patch.object(torch, "cat", side_effect=ValueError), pytest.raises(ValueError):
                module(16)
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            assert type(module).forward.cache_info().currsize == 0
        assert torch.is_grad_enabled()


def test_with_recompute_training_goes_on_to_the_same_bits():
    with pytest.raises(RuntimeError, match=REFUSED):
        gradients(evaluated=True, **FULL)
    truth = gradients(evaluated=False, **FULL)
    with applied():
        assert torch.equal(gradients(evaluated=True, **FULL), truth)
        assert torch.equal(gradients(evaluated=False, **FULL), truth)


def test_without_recompute_it_goes_on_as_on_stock():
    stock = gradients(evaluated=True)
    with applied():
        assert torch.equal(gradients(evaluated=True), stock)


def test_a_trainer_may_replace_forward_by_a_function_without_a_cache(monkeypatch):
    """It gets no cache, and its own may keep what it makes."""
    kept = {}
    body = inspect.unwrap(rotary_pos_embedding.RotaryEmbedding.forward)

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return kept.setdefault((self, max_seq_len), body(self, max_seq_len, offset, packed_seq))

    monkeypatch.setattr(rotary_pos_embedding.RotaryEmbedding, "forward", forward)
    wrapped = _kept(forward)
    module = rope()
    with torch.inference_mode():
        found = wrapped(module, 16)
    assert not found.is_inference() and wrapped(module, 16) is found and inspect.isfunction(wrapped)


@pytest.mark.skipif(VARIANT == "v0_12", reason="fused MLA came with 0.13")
@pytest.mark.parametrize("built_in_inference_mode", [False, True])
def test_tables_of_fused_mla_can_be_saved(built_in_inference_mode):
    with applied():
        with torch.inference_mode(built_in_inference_mode):
            module = yarn()
        for length in (4, 16):  # of which one fits the table that is made with the module
            with torch.inference_mode():
                module.get_cached_cos_sin(length, dtype=torch.float32)
            assert not any(table.is_inference() for table in module.get_cached_cos_sin(length, dtype=torch.float32))


@pytest.mark.skipif(VARIANT != "v0_20", reason="the plain embedding has such tables from 0.20")
def test_tables_of_the_plain_embedding_can_be_saved():
    for context in (applied, None):
        module = rope()
        with context() if context else torch.no_grad():
            with torch.inference_mode():
                module.get_cached_cos_sin(16)
            assert all(table.is_inference() == (context is None) for table in module.get_cached_cos_sin(16))


def test_a_compiled_graph_has_no_cache_as_on_stock():
    """Compiled code of megatron-core takes a device of CUDA, so a function of the same kind stands for it."""

    @functools.lru_cache(maxsize=32)
    def table(length):
        return torch.arange(length).cos()

    x = torch.ones(16, requires_grad=True)
    for make in (table, _kept(table), _made_outside(table)):
        torch.compiler.reset()
        compiled = torch.compile(lambda x, make=make: x * make(16), backend="aot_eager", fullgraph=True)
        with torch.inference_mode():
            assert torch.equal(compiled(x.detach()), torch.arange(16).cos())
        x.grad = None
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.arange(16).cos())
    torch.compiler.reset()


@pytest.mark.parametrize("make", [rope, yarn])
def test_a_checkpoint_may_save_the_table(make):
    """As that of the layers does with full recompute."""
    x = torch.ones(16, 1, 1, 8, requires_grad=True)

    def gradient():
        module = make()
        with torch.inference_mode():
            module(16)
        table = tensor(module(16))
        x.grad = None
        tensor_parallel.checkpoint(lambda x, table: x * table.cos(), False, x, table).sum().backward()
        return x.grad, table.cos()

    with pytest.raises(RuntimeError, match=REFUSED):
        gradient()
    with applied():
        found, expected = gradient()
    assert torch.equal(found, expected)
