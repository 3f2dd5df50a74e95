"""mla-rope-key-gradient: one sum over ranks for each rotary key whose gradient stock does not sum, and no other."""

import contextlib
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch.distributed import all_reduce

import shim
from shim import testing
from shim.patches.megatron_core import _proof_mla as cases
from shim.patches.megatron_core._proof_recompute import checkpoints_without_te
from shim.testing.model import _Adapter, _add_update

CELLS = {"0.17.0": "all"}

ID = "mla-rope-key-gradient"
MINOR = tuple(int(part) for part in testing.release().split(".")[:2])


# 0.12 has no kernels, and 0.20 has others.
FUSION = "megatron.core.fusions.fused_mla_yarn_rope_apply"
HAS_KERNELS = MINOR >= (0, 13) and hasattr(import_module(FUSION), "ApplyMLARotaryEmbKV")


@contextlib.contextmanager
def patched(active):
    with shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext():
        yield


def rotated(kv, key, cos, sin, rotary_dim, key_dim, value_dim, *ignored):
    """Stands for the fused kernel: the shared key turned by the table, and beside each head's own key."""
    first, second = key.chunk(2, -1)
    turned = key * cos[: len(key)] + torch.cat([-second, first], -1) * sin[: len(key)]
    own, value = kv.split([key_dim, value_dim], -1)
    return torch.cat([own, turned.expand(*own.shape[:-1], -1)], -1), value


def rotated_query(query, cos, sin, key_dim, rotary_dim, *ignored):
    own, turned = query.split([key_dim, rotary_dim], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([own, turned * cos[: len(query)] + torch.cat([-second, first], -1) * sin[: len(query)]], -1)


@contextlib.contextmanager
def fused_kernels():
    """What a GPU is needed for, stood in below the functions that attention calls."""
    fusion = import_module(FUSION)
    with contextlib.ExitStack() as stack:
        # Up to 0.15 they are experimental, and off by default.
        stack.enter_context(mock.patch("megatron.core.config.ENABLE_EXPERIMENTAL", True))
        for name, kernel in (("KV", rotated), ("Q", rotated_query)):
            function = mock.Mock(apply=kernel)
            stack.enter_context(mock.patch.object(fusion, f"ApplyMLARotaryEmb{name}", function))
        yield


def gradients(active, case, sequence_parallel=False, layer_change="", **overrides):
    """(gradients by name, that of the hidden states under "hidden"; how many sums of a rotary key's size) of a step."""
    from megatron.core import parallel_state

    keys = []

    def counted(tensor, *args, **kwargs):
        if tensor.shape[-1] == 4:  # qk_pos_emb_head_dim, and nothing else
            keys.append(tuple(tensor.shape))
        return all_reduce(tensor, *args, **kwargs)

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with contextlib.ExitStack() as stack:
        stack.enter_context(testing.megatron_on_cpu())
        stack.enter_context(patched(active))
        module = stack.enter_context(cases.without_te())
        if case == "fused":
            stack.enter_context(fused_kernels())
            overrides |= {"apply_rope_fusion": True, "rope_type": "yarn"}
        if case == "recompute":
            stack.enter_context(checkpoints_without_te())
            overrides |= {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
        layer = cases.build(module, sequence_parallel=sequence_parallel, **overrides)
        if layer_change:
            layer.requires_grad_(False)
        if layer_change == "lora":
            linear = layer.linear_kv_down_proj
            linear.lora = _Adapter(linear, 2, True)
            whole = torch.randn(12, 2, generator=torch.Generator().manual_seed(3))
            with torch.no_grad():
                linear.lora.down.copy_(torch.randn(2, cases.HIDDEN, generator=torch.Generator().manual_seed(2)))
                linear.lora.up.copy_(whole.chunk(size)[rank])
            linear.register_forward_hook(_add_update)
        generator = torch.Generator().manual_seed(1)
        hidden, weights = (torch.randn(cases.TOKENS, cases.BATCH, cases.HIDDEN, generator=generator) for _ in "hw")
        if sequence_parallel:
            hidden, weights = (whole.chunk(size)[rank] for whole in (hidden, weights))
        hidden = hidden.clone().requires_grad_()
        output = layer(hidden, None)[0]
        with mock.patch.object(torch.distributed, "all_reduce", counted):
            (output * weights).sum().backward()
        found = {name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None}
        return found | {"hidden": hidden.grad}, keys


def on_two_ranks(*args, **kwargs):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        return gradients(*args, **kwargs)


def of_one_rank(*args, **kwargs):
    with testing.layout_initialised(testing.Layout()):
        return gradients(False, *args, **kwargs)[0]


def assert_gradients_are_those_of_one_rank(found, expected):
    for rank, (mine, _) in enumerate(found):
        assert mine.keys() == expected.keys()
        for name, gradient in mine.items():
            whole = expected[name]
            dims = [dim for dim in range(whole.dim()) if whole.shape[dim] != gradient.shape[dim]]
            part = whole.chunk(2, dims[0])[rank] if dims else whole
            assert torch.allclose(gradient, part, rtol=1e-4, atol=1e-5), name


CASES = {
    "one head a rank": {"heads": 2},
    "no query rank": {"q_lora_rank": None},
    "recompute": {},
    "frozen": {"layer_change": "frozen"},
    "lora": {"layer_change": "lora"},
}
if HAS_KERNELS:
    CASES["fused"] = {}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_rank(ranks2, name):
    found = ranks2.run(two, True, name, CASES[name])
    assert_gradients_are_those_of_one_rank(found, of_one_rank(name, **CASES[name]))
    assert [len(keys) for _, keys in found] == [1, 1]


def two(active, name, overrides):
    return on_two_ranks(active, name, **overrides)


@pytest.mark.skipif(MINOR < (0, 14), reason="no projection is duplicated before 0.14")
def test_a_duplicated_projection_with_sequence_parallelism_is_as_on_stock(ranks2):
    """Upstream gathers the key over ranks, and the backward of that sums."""
    overrides = {"duplicated": True, "sequence_parallel": True}
    found = ranks2.run(two, True, "", overrides)
    stock = ranks2.run(two, False, "", overrides)
    for (mine, keys), (expected, _) in zip(found, stock, strict=True):
        assert not keys
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_one_rank_is_as_on_stock():
    with testing.layout_initialised(testing.Layout()):
        found, keys = gradients(True, "")
        stock, _ = gradients(False, "")
    assert not keys
    assert all(torch.equal(found[name], stock[name]) for name in stock)


def left_by_a_failure():
    from shim.patches.megatron_core import mla_rope_key_gradient

    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)), patched(True):
        with cases.without_te() as module:
            layer = cases.build(module)
            layer.linear_kv_up_proj.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                layer(torch.randn(cases.TOKENS, cases.BATCH, cases.HIDDEN), None)
        # A failure comes before the key is rotated: the next query counts from the start.
        return mla_rope_key_gradient._LAYER.value


def test_an_exception_inside_leaves_nothing_behind(ranks2):
    assert ranks2.run(left_by_a_failure) == [None, None]


def state_with_an_override(tp, overrides):
    """What check() says of a layer whose class has a method of its own, as mcore-bridge's has."""
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=tp)), patched(True):
        with cases.without_te() as module:
            layer = cases.build(module, **overrides)
            own = {"get_query_key_value_tensors": lambda self, *args, **kwargs: None}
            layer.__class__ = type("Own", (type(layer),), own)
            return shim.check(layer)[ID].state


@pytest.mark.parametrize(
    ("tp", "overrides", "state"),
    [
        (1, {}, "applied"),
        (2, {}, "unknown"),
        (2, {"sequence_parallel": True}, "unknown"),
        (2, {"sequence_parallel": True, "duplicated": True}, "applied"),
    ],
)
def test_an_override_hides_nothing_where_nothing_is_to_be_summed(ranks2, tp, overrides, state):
    """On one rank, and where the rotary key of a duplicated projection has to be gathered."""
    if overrides.get("duplicated") and MINOR < (0, 14):
        pytest.skip("no projection is duplicated before 0.14")
    if tp == 1:
        assert state_with_an_override(tp, overrides) == state
    else:
        assert ranks2.run(state_with_an_override, tp, overrides) == [state, state]
