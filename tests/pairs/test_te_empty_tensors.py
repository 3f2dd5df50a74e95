"""te-empty-tensors: full lists go through untouched, norms keep their places, local shards of DTensors decide."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shim
from shim import testing
from shim.patches.transformer_engine.te_empty_tensors.proof import error_of_norm, norm, unlike_adamw
from shim.testing import multi_tensor

CELLS = {"0.12.0+2.2.0": "all"}

ID = "te-empty-tensors"
BEFORE = shim.plan()[ID].variant == "v2_1"
before = pytest.mark.skipif(not BEFORE, reason="this release keeps empty tensors from the operation")
APPLY = "transformer_engine.pytorch.optimizers.multi_tensor_apply"


@pytest.fixture
def applier():
    """Upstream's instance, with the patch."""
    with shim.patched(only=[ID], require=[ID]), testing.multi_tensor_ops():
        yield import_module(APPLY).multi_tensor_applier


def seen_by_an_operation(applier, lists):
    """What an operation gets of these lists."""
    seen = []

    def operation(chunk_size, noop_flag, tensor_lists, *args):
        seen.append((tensor_lists, args))

    assert applier(operation, None, lists, 1.0) is None
    return seen


def test_full_lists_go_to_the_operation_as_they_are(applier):
    lists = [[torch.ones(3), torch.ones(2)], [torch.zeros(3), torch.zeros(2)]]
    ((found, args),) = seen_by_an_operation(applier, lists)
    assert args == (1.0,)
    assert [[id(tensor) for tensor in tensors] for tensors in found] == [[id(t) for t in ts] for ts in lists]
    assert not BEFORE or found is lists


def test_empty_places_are_left_out_of_every_list(applier):
    first = [torch.ones(0), torch.ones(3), torch.ones(0), torch.ones(2), torch.ones(0)]
    second = [torch.zeros(tensor.numel()) for tensor in first]
    ((found, _),) = seen_by_an_operation(applier, [list(first), list(second)])
    for tensors, given in zip(found, (first, second), strict=True):
        assert [id(tensor) for tensor in tensors] == [id(given[1]), id(given[3])]


@before
def test_of_empty_tensors_alone_the_operation_gets_one(applier):
    """Nothing is launched, and an operation that returns something does so. From 2.18 on it would refuse the tensor."""
    ((found, _),) = seen_by_an_operation(applier, [[torch.ones(0)] * 200, [torch.ones(0)] * 200])
    assert [len(tensors) for tensors in found] == [1, 1]


@before
def test_lists_of_unequal_length_are_left_to_the_operation(applier):
    lists = [[torch.ones(0), torch.ones(2)], [torch.ones(2)]]
    ((found, _),) = seen_by_an_operation(applier, lists)
    assert found is lists


def local(size):
    """A stand-in for a DTensor: its shard here has `size` elements."""
    return SimpleNamespace(_local_tensor=torch.ones(size), numel=lambda: 8)


def test_the_local_shard_of_a_dtensor_decides(applier, monkeypatch):
    monkeypatch.setattr(import_module(APPLY), "DTensor", SimpleNamespace)
    ((found, _),) = seen_by_an_operation(applier, [[local(3), local(0)]])
    assert [tensor.numel() for tensor in found[0]] == [3]


@pytest.mark.parametrize("sizes", [(2, 0, 3, 0), (0, 0, 4), (0,), (0, 0), (2, 3)])
@pytest.mark.parametrize("per_tensor", [True, False])
def test_norms_stand_in_the_places_of_their_tensors(applier, sizes, per_tensor):
    l2norm = import_module("transformer_engine.pytorch.optimizers").multi_tensor_l2norm
    total, single = applier(l2norm, torch.zeros(1), [[torch.ones(size) for size in sizes]], per_tensor)
    assert total.shape == (1,)
    assert total.item() == pytest.approx(sum(sizes) ** 0.5)
    assert single.tolist() == (pytest.approx([size**0.5 for size in sizes]) if per_tensor else [])


@before
def test_stock_loses_the_norms_that_the_patch_keeps():
    """The test above fails without the patch: the chunks that wait are lost."""
    l2norm = import_module("transformer_engine.pytorch.optimizers").multi_tensor_l2norm
    with testing.multi_tensor_ops():
        total, _ = import_module(APPLY).multi_tensor_applier(l2norm, torch.zeros(1), [[torch.ones(2), torch.ones(0)]])
    assert total.item() == 0


def test_what_stock_does_right_stays():
    """Full lists, more than one table of them: the same bits."""
    gradients = [torch.randn(7, generator=torch.Generator().manual_seed(seed)) for seed in range(250)]
    with testing.layout_initialised(testing.Layout()):
        expected = norm(list(gradients))
        with shim.patched(only=[ID], require=[ID]):
            assert norm(list(gradients)) == expected


def test_clipping_scales_every_gradient(applier):
    """As megatron-core does it, with the same list twice."""
    scale = import_module("transformer_engine.pytorch.optimizers").multi_tensor_scale
    gradients = [torch.ones(3), torch.ones(0), torch.ones(2), torch.ones(0)]
    applier(scale, torch.zeros(1), [gradients, gradients], 0.5)
    assert [gradient.unique().tolist() for gradient in gradients] == [[0.5], [], [0.5], []]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 3, 0, 5, 0), (0, 0)])
def test_empty_shards_anywhere(sizes):
    with shim.patched(only=[ID], require=[ID]), testing.layout_initialised(testing.Layout()):
        assert unlike_adamw(sizes) == 0
        assert error_of_norm(sizes) < 1e-6


def test_an_operation_that_raises_leaves_nothing_behind(applier):
    def operation(*args):
        raise ValueError("an operation's own error")

    with pytest.raises(ValueError, match="own error"):
        applier(operation, None, [[torch.ones(2), torch.ones(0)]])
    assert seen_by_an_operation(applier, [[torch.ones(2)]])


@before
def test_the_stand_in_follows_this_release():
    with pytest.raises(multi_tensor.TableOverrunError), testing.multi_tensor_ops():
        unlike_adamw((*[3] * 35, 0, 3))


def sharded_lora():
    """On two ranks: the norm of the gradients of a LoRA of rank one, cut by rows, and what clipping makes of them."""
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.arange(1.0, 9.0).reshape(4, 2), torch.ones(1, 6)]  # its B, and its A, of which rank 1 has no row
    gradients = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
    optimizers = import_module("transformer_engine.pytorch.optimizers")
    with testing.multi_tensor_ops():
        squares, _ = optimizers.multi_tensor_applier(
            optimizers.multi_tensor_l2norm, torch.zeros(1), [list(gradients)], False
        )
        optimizers.multi_tensor_applier(
            optimizers.multi_tensor_scale, torch.zeros(1), [list(gradients), list(gradients)], 0.5
        )
    return squares.item() ** 2, [tensor.to_local().flatten().tolist() for tensor in gradients]


def on_two_ranks(patched):
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), testing.layout_initialised(testing.Layout(ep=2)):
        if not patched:
            return sharded_lora()
        with shim.patched(only=[ID], require=[ID]):
            return sharded_lora()


def test_lora_with_more_ranks_than_rows():
    """DTensors as FSDP2 makes them. Rank 1 owns two rows of B, and none of A, which comes last."""
    with testing.Ranks(2) as ranks:
        (first, mine), (second, other) = ranks.run(on_two_ranks, True)
    assert first == pytest.approx(1 + 4 + 9 + 16 + 6)
    assert second == pytest.approx(25 + 36 + 49 + 64)
    assert mine == [[0.5, 1.0, 1.5, 2.0], [0.5] * 6]
    assert other == [[2.5, 3.0, 3.5, 4.0], []]


@before
def test_stock_leaves_the_shards_of_lora_as_they_are():
    with testing.Ranks(2) as ranks:
        _, (second, other) = ranks.run(on_two_ranks, False)
    assert second == 0
    assert other == [[5.0, 6.0, 7.0, 8.0], []]
