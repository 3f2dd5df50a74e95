"""muon-qkv-shapes: each weight is split by its own attention, whatever the parameters that Muon steps on."""

import contextlib
import functools
import importlib.util

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.muon_qkv_shapes.proof import (
    changes,
    error,
    few_groups,
    gated_model,
    language_model,
    muon,
    with_a_tower,
)
from shim.testing.proof import Here

CELLS = {"0.17.1": "all"}

ID = "muon-qkv-shapes"
VARIANT = shim.plan()[ID].variant
NEEDED = VARIANT is not None
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
splits_wrongly = pytest.mark.skipif(VARIANT not in ("v0_16", "v0_18"), reason="it knows of the gate")
undivided_tower = functools.partial(with_a_tower, hidden_size=40, num_attention_heads=5, num_query_groups=5)
in_bf16 = functools.partial(gated_model, params_dtype=torch.bfloat16, bf16=True)
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def applied():
    return shim.patched(only=[ID], require=[ID])


@needed
@pytest.mark.parametrize("settings", [{}, {"muon_split_qkv": False}], ids=["split", "whole"])
def test_what_stock_does_right_stays(one_rank, settings):
    """Attention without a gate, and without other attention beside it. Unsplit weights stay unsplit."""
    build = language_model if not settings else gated_model
    stock = changes(build, **settings)
    with applied():
        found = changes(build, **settings)
    assert [bool(change.any()) for change, _ in found] == [True]
    assert all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in zip(found, stock, strict=True))


@needed
def test_gated_attention_is_right_on_stock_from_0_19_on(one_rank):
    off = error(gated_model)
    assert off < 1e-5 if VARIANT == "v0_19" else off > 0.3


@needed
def test_a_tower_whose_rows_do_not_divide(one_rank):
    """120 rows by shapes of 32."""
    assert error(undivided_tower) > 0.3
    with applied():
        assert error(undivided_tower) < 1e-5


@splits_wrongly
def test_main_parameters_have_the_shapes(one_rank):
    """A step on bf16 weights is one on their fp32 copies, here up to the rounding of the weights."""
    assert error(in_bf16, **BF16) > 0.3
    with applied():
        assert error(in_bf16, **BF16) < 3e-2


@splits_wrongly
@pytest.mark.parametrize("build", [gated_model, with_a_tower])
def test_each_tensor_parallel_rank_splits_its_query_groups(build):
    """Each has whole groups, which it orthogonalizes alone (muon_tp_mode is blockwise by default)."""
    with applied():
        assert max(Here(world=2).run(error, build, layout=testing.Layout(tp=2))) < 1e-5


def shapes_beside(active, build):
    patch = applied() if active else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)), patch:
        model = build()
        patch_module = importlib.import_module("shim.patches.megatron_core.muon_qkv_shapes")
        patch_module._give_shapes([model])
        weight = model.decoder.layers[0].self_attention.linear_qkv.weight
        return len(weight), getattr(weight, "qkv_split_shapes", None)


@needed
def test_ranks_that_share_a_query_group_are_left_alone(ranks2):
    """Half a group has no shapes."""
    assert ranks2.run(shapes_beside, True, few_groups) == [(36, None)] * 2
    assert ranks2.run(shapes_beside, True, gated_model) == [(48, [16, 16, 8, 8])] * 2


@splits_wrongly
def test_the_optimizers_shapes_stay_also_after_an_exception(one_rank):
    """The step of another weight, which has none, is to see those of the model."""
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    weight.is_qkv, weight.qkv_split_shapes = True, [1, 1, 1, 1]
    seen = []

    def fails(gradient, *_):
        seen.append(len(gradient))  # one row, and two by the model's shapes
        raise ArithmeticError

    module = "emerging_optimizers" if VARIANT == "v0_18" else "muon"
    with applied(), muon():
        kind = importlib.import_module(f"megatron.core.optimizer.{module}").TensorParallelMuon
        optimizer = kind([weight], split_qkv=True, is_qkv_fn=lambda p: p.is_qkv, qkv_split_shapes=[2, 1, 1])
        optimizer.scaled_orthogonalize_fn = fails
        with pytest.raises(ArithmeticError):
            optimizer.orthogonalize(weight, torch.ones(4, 4))
    assert seen == [1]
    assert optimizer.qkv_split_shapes == [2, 1, 1]
