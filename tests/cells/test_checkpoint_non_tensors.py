"""checkpoint-non-tensors: with two rotary tables recompute gives the bits of no recompute, and keeps nothing more."""

import contextlib
import weakref

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from recompute_cases import METHODS

import shim
from shim import testing
from shim.patches.megatron_core.checkpoint_non_tensors.proof import UNIFORM, gradients, unequal, with_two_tables
from shim.testing import Layout

CELLS = {"0.12.0": "all", "0.19.2": ["test_layers_of_a_hybrid_model"]}

ID = "checkpoint-non-tensors"
pytestmark = pytest.mark.usefixtures("one_rank")
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
LENGTHS = {"one": (16,), "packed": (5, 13, 3)}


def applied(*others):
    return shim.patched(only=[ID, *others], require=[ID])


@contextlib.contextmanager
def inside(layout, *others):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), applied(*others):
        yield


def results(kind, build=testing.build_gpt, adapters=False, embedded=False, **options):
    """Losses and gradients of a row of this kind. embedded: the model gets embeddings, as from a wrapper for images."""
    model = with_two_tables(build, **{"mtp_num_layers": None, "num_layers": 3, "hidden_dropout": 0.1, **options})
    if adapters:
        testing.add_lora(model)
    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    row = testing.pack(testing.random_sequences(LENGTHS[kind]), align=8)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(row.input_ids.numel(), 1, model.config.hidden_size, generator=generator) if embedded else None
    found = testing.run_packed(model, row, decoder_input=states)
    return {"losses": found.main, **{f"mtp {k}": loss for k, loss in enumerate(found.mtp)}, **found.grads}


def differing(kind, method, **options):
    """How many losses and gradients with recompute by this method differ from those without, and of how many."""
    right = results(kind, **options)
    return unequal(results(kind, **options, **METHODS[method]), right), len(right)


# Up to 0.16 the last chunk of a method "uniform 2" asks for a fourth layer, and packed rows share the rows of a table.
BESIDE = ("uniform-recompute-end", "rope-thd")


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("method", METHODS)
def test_recompute_gives_the_bits_of_no_recompute(method, kind):
    with applied(*BESIDE):
        wrong, of = differing(kind, method)
    assert of > 20 and not wrong


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_wrapper_that_gives_embeddings(kind):
    """As one for images and text does. The embeddings get their gradient."""
    with applied(*BESIDE):
        assert "decoder_input" in results(kind, embedded=True, **UNIFORM)
        assert differing(kind, "uniform 1", embedded=True)[0] == 0


def test_adapters_are_trained():
    """Behind frozen embeddings, together with frozen-recompute."""
    with applied("frozen-recompute"):
        wrong, of = differing("one", "uniform 1", adapters=True)
    assert of > 20 and not wrong


@pytest.mark.skipif(VERSION < (0, 18), reason="no full recompute of hybrid models before 0.18")
def test_layers_of_a_hybrid_model():
    with applied():
        options = {"build": testing.build_hybrid, "pattern": "*-*-", "num_layers": 4}
        right = hybrid(**options)
        assert len(right) > 10 and not unequal(hybrid(**options, **UNIFORM), right)


def hybrid(**options):
    return gradients(with_two_tables(**options))


@pytest.mark.parametrize("method", METHODS)
def test_with_all_patches(method):
    """With layers of multi-token prediction, on a packed row."""
    with shim.patched(require=[ID]) as report:
        wrong, of = differing("packed", method, mtp_num_layers=2)
        assert report["mtp-recompute"].state == "applied"
    assert of > 40 and not wrong


def on_ranks(layout, kind, method, options):
    with inside(layout, *BESIDE):
        right = results(kind, num_layers=4)
        return unequal(results(kind, num_layers=4, **METHODS[method], **options), right), len(right)


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=str)
def test_on_two_ranks(ranks2, layout, kind):
    for method in ("uniform 1", "block 1"):
        for wrong, of in ranks2.run(on_ranks, layout, kind, method, {}):
            assert of > 5 and not wrong


@pytest.mark.parametrize("kind", LENGTHS)
def test_inputs_that_are_distributed(ranks2, kind):
    """Only the hidden states are: each rank keeps a part of them, and all of the tables."""
    distributed = {"distribute_saved_activations": True}
    for wrong, of in ranks2.run(on_ranks, Layout(tp=2), kind, "uniform 1", distributed):
        assert of > 20 and not wrong


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_each_tensor_gets_its_gradient():
    """In a tuple, in a list, and in a tuple inside of one. What is no tensor stays what it is."""
    a, b, c, d = (leaf(3).detach().mul(k).requires_grad_() for k in (1, 2, 3, 4))
    row, seen = PackedSeqParams(qkv_format="thd"), []

    def product(first, pair, others, number, params):
        seen.append((type(pair), type(others), number, params))
        return first * pair[0] * pair[1][0] * others[1]

    def step(call):
        for tensor in (a, b, c, d):
            tensor.grad = None
        call(a * 1, (b, (c, None)), [None, d], 7, row).sum().backward()
        return [tensor.grad for tensor in (a, b, c, d)]

    right = step(product)
    with applied():
        found = step(lambda *args: tensor_parallel.checkpoint(product, False, *args))
    assert all(map(torch.equal, found, right))
    assert len(seen) == 3 and all(one == (tuple, list, 7, row) for one in seen)


def test_nothing_is_kept_after_backward():
    """Up to backward the checkpoint keeps the tensors alone, and no tuple."""
    with applied():
        table = leaf(5).detach()
        states, alive = leaf(5), weakref.ref(table)
        output = tensor_parallel.checkpoint(lambda states, pair: states * pair[0], False, states, (table, None))
        del table
        assert alive() is not None
        output.sum().backward()
        assert alive() is None


def test_hooks_on_saved_tensors_see_the_parts():
    """As offloading of activations has them: each part once, and nothing that is no tensor."""
    first, second, states, packed = leaf(2).detach(), leaf(3).detach(), leaf(4), []
    with (
        applied(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda t: t),
    ):
        tensor_parallel.checkpoint(lambda states, pair: states * 2, False, states, (first, second))
    assert [tuple(tensor.shape) for tensor in packed] == [(4,), (2,), (3,)]


def test_without_gradients():
    """Nothing is saved, and the function gets its tuple."""
    with applied(), torch.no_grad():
        output = tensor_parallel.checkpoint(lambda states, pair: states + pair[1], False, leaf(3), (None, leaf(3)))
    assert not output.requires_grad and torch.equal(output, 2 * leaf(3).detach())


def layer_of(closure):
    def run(states, *_):
        return states * closure

    return run


@pytest.mark.parametrize("more", [(), (None,), ((leaf(3).detach(), None),)], ids=["tensors", "None", "a tuple"])
def test_trainers_find_what_they_look_for(more):
    """The function itself goes on if there is nothing to do. Otherwise its cells can be read, where trainers look."""
    function = layer_of(3.0)
    with applied():
        run = tensor_parallel.checkpoint(function, False, leaf(3), *more).grad_fn.run_function
    assert (run is function) is (not more or more[0] is None)
    assert [cell.cell_contents for cell in run.__closure__] == [3.0]
