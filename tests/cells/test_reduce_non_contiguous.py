"""reduce-non-contiguous: an all-reduce over tensor-parallel ranks returns what it has summed."""

from unittest import mock

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import mappings
from torch.utils._python_dispatch import TorchDispatchMode

import shim
from shim import testing
from shim.patches.megatron_core.reduce_non_contiguous.proof import alone, mine, sample, transposed_after
from shim.testing import Layout

CELLS = {"0.12.3": "all"}

ID = "reduce-non-contiguous"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
TAKES_GROUP = testing.release() >= "0.13"

PARTS = {  # ways to a tensor [3, 2] that holds the rank's part, by name
    "whole": lambda part: part,
    "transposed": lambda part: part.t().contiguous().t(),
    "sliced": lambda part: torch.cat([part, part], 1)[:, :2],
    "expanded": lambda part: part[:1].expand(3, 2),
    "empty": lambda part: part[:0].t(),
}


class Operations(TorchDispatchMode):
    """The names of all operations, messages included."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def reduced(tensor):
    return (
        mappings._reduce(tensor, parallel_state.get_tensor_model_parallel_group())
        if TAKES_GROUP
        else (mappings._reduce(tensor))
    )


def part_of(rank):
    return torch.arange(6.0).reshape(3, 2) * (rank + 1)


def reduced_on_rank(tp):
    """By name, on stock and with the patch: (right, the same object came back, the input stayed, operations)."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=tp)):
        rank, found = parallel_state.get_tensor_model_parallel_rank(), {}
        for name, made in PARTS.items():
            expected = sum(made(part_of(other)) for other in range(tp))
            found[name] = []
            for ids in ([], [ID]):
                tensor = made(part_of(rank))
                with shim.patched(only=ids, require=ids), Operations() as ran:
                    result = reduced(tensor)
                stayed = torch.equal(tensor, made(part_of(rank)))
                found[name].append((torch.equal(result, expected), result is tensor, stayed, ran.names))
        return found


@needed
def test_what_is_returned_is_the_sum_for_no_more_operations_than_stock(ranks2):
    for found in ranks2.run(reduced_on_rank, 2):
        for name, ((_, _, _, before), (right, _, _, after)) in found.items():
            assert right, name
            assert after == before, name


@needed
def test_stock_returns_the_part_of_the_rank(ranks2):
    for found in ranks2.run(reduced_on_rank, 2):
        assert {name for name, ((right, *_), _) in found.items() if right} == {"whole", "empty"}


@needed
def test_a_contiguous_tensor_is_reduced_in_place_and_another_one_stays(ranks2):
    for found in ranks2.run(reduced_on_rank, 2):
        for name, (stock, patched) in found.items():
            assert patched[1] == (name in ("whole", "empty")), name
            assert patched[2] == stock[2] == (name != "whole"), name


@needed
def test_one_rank_alone_gets_its_tensor_back_without_an_operation():
    for name, (_, (right, itself, stayed, operations)) in reduced_on_rank(1).items():
        assert (right, itself, stayed, operations) == (True, True, True, []), name


def calls_on_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)), shim.patched(only=[ID], require=[ID]):
        given = PARTS["transposed"](part_of(parallel_state.get_tensor_model_parallel_rank()))
        expected = part_of(0) + part_of(1)
        named = {"group": parallel_state.get_tensor_model_parallel_group()} if TAKES_GROUP else {}
        right = [torch.equal(mappings._reduce(input_=given, **named), expected)]
        with (
            mock.patch.object(torch.distributed, "all_reduce", side_effect=ConnectionError("lost")),
            pytest.raises(ConnectionError, match="lost"),
        ):
            reduced(given)
        right.append(torch.equal(reduced(given), expected))
        if TAKES_GROUP:
            right.append(mappings._reduce(given, parallel_state.get_data_parallel_group()) is given)
            with pytest.raises(AssertionError):
                mappings._reduce(given, None)
        return right


@needed
def test_arguments_by_name_an_error_inside_and_other_groups(ranks2):
    """A group of one rank gets its tensor back, whatever the tensor-parallel size is."""
    for right in ranks2.run(calls_on_rank):
        assert all(right)


def ways_on_rank(way):
    """How far outputs and gradients of an MLP are from those of the whole weights."""
    ids = [ID] if NEEDED else []
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(tp=2)), shim.patched(only=ids, require=ids):
        hidden, _, *whole = sample()
        outputs = []
        for computed, weights in ((alone, whole), (transposed_after, mine(*whole))):
            weights = [weight.clone().requires_grad_() for weight in weights]
            if computed is alone:
                out = computed(hidden, *weights)
            elif way == "recompute":
                tensor_parallel.model_parallel_cuda_manual_seed(0)
                out = tensor_parallel.checkpoint(computed, False, hidden, *weights)
            else:
                out = torch.compile(computed, backend="eager")(hidden, *weights)
            out.square().mean().backward()
            gradients = [weight.grad for weight in weights]
            outputs.append((out.detach(), *(mine(*gradients) if computed is alone else gradients)))
        return max(float((found - true).norm() / true.norm()) for true, found in zip(*outputs, strict=True))


@pytest.mark.parametrize("way", ["recompute", "compile"])
def test_recomputed_and_compiled(ranks2, way):
    assert max(ranks2.run(ways_on_rank, way)) < 1e-12
