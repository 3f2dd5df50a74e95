"""uniform-recompute-end: the last chunk of layers may be shorter than the others, and trains to the bit as they do."""

import types

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.mtp_recompute.proof import OneSequence
from shim.patches.megatron_core.uniform_recompute_end.proof import CHUNKS_OF_TWO, gradients, unequal
from shim.testing import Layout

CELLS = {"0.12.0": "all"}

ID = "uniform-recompute-end"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def patched():
    return shim.patched(only=[ID], require=[ID])


def block_of(layers, **options):
    return testing.build_gpt(num_layers=layers, mtp_num_layers=None, **{**CHUNKS_OF_TWO, **options}).decoder


def test_adapters_are_trained_as_without_recompute():
    """Frozen weights, and adapters in all three layers."""
    with patched():
        assert unequal(adapters=True) == 0
        assert len(gradients(adapters=True, **CHUNKS_OF_TWO)[0]) == 24


@pytest.mark.parametrize("size", [4, 7])
def test_a_chunk_may_be_larger_than_the_block(size):
    with patched():
        found = gradients(**{**CHUNKS_OF_TWO, "recompute_num_layers": size})
    right = gradients()
    assert all(torch.equal(one[name], other[name]) for one, other in zip(found, right) for name in other)


def test_each_layer_runs_once_in_forward_and_once_in_backward():
    with patched():
        model, calls = testing.build_gpt(num_layers=3, mtp_num_layers=None, **CHUNKS_OF_TWO), []
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(lambda module, inputs: calls.append(module.layer_number))
        ids = torch.arange(8)[None]
        model(ids, ids, None, labels=ids).mean().backward()
    assert calls == [1, 2, 3, 3, 1, 2]


def gradients_of_stage(**recompute):
    """Of this pipeline rank, in a step on a model whose first stage has three layers, and the second two."""
    options = {"share_embeddings_and_output_weights": False, "num_layers_in_first_pipeline_stage": 3}
    model = testing.build_gpt(num_layers=5, mtp_num_layers=None, **options, **recompute)
    row = testing.pack(testing.random_sequences((6,)))
    return testing.run_packed(model, OneSequence(**vars(row))).grads


def stage_is_right():
    with testing.layout_initialised(Layout(pp=2)), patched():
        right, found = gradients_of_stage(), gradients_of_stage(**CHUNKS_OF_TWO)
    return found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


def test_stages_of_unequal_length(ranks2):
    """Chunks of two: the first stage ends early, the second does not."""
    assert ranks2.run(stage_is_right) == [True, True]


@pytest.mark.parametrize("layers", [2, 4])
def test_what_fills_its_chunks_gets_upstreams_layers(layers):
    block = block_of(layers)
    with patched():
        assert [block._get_layer(number) for number in range(layers)] == [*block.layers]
        with pytest.raises(IndexError):
            block._get_layer(layers)


@pytest.mark.parametrize(
    "options", [{"recompute_method": "block"}, dict.fromkeys(CHUNKS_OF_TWO)], ids=["block", "none"]
)
def test_a_number_behind_the_end_stays_an_error_where_there_are_no_chunks(options):
    block = block_of(3, **options)
    with patched(), pytest.raises(IndexError):
        block._get_layer(3)


def test_a_number_behind_the_last_chunk_stays_an_error():
    block = block_of(3)
    with patched(), pytest.raises(IndexError):
        block._get_layer(4)


def without_end(self, number):
    return self.layers[number]


def with_end(self, number):
    return (
        self.layers[number]
        if number < len(self.layers)
        else lambda hidden_states, context, **rest: (hidden_states, context)
    )


@pytest.mark.parametrize(
    ("layers", "override", "state"),
    [(3, without_end, "shadowed"), (3, with_end, "applied"), (4, without_end, "applied")],
)
def test_check_tries_an_override(layers, override, state):
    """One that has an end of its own hides nothing, nor does any where no chunk has to end early."""
    model = testing.build_gpt(num_layers=layers, mtp_num_layers=None, **CHUNKS_OF_TWO)
    model.decoder._get_layer = types.MethodType(override, model.decoder)
    with patched():
        if state == "applied":
            assert shim.check(model)[ID].state == state
        else:
            with pytest.raises(shim.NotMetError, match=f"{ID} is shadowed"):
                shim.check(model)
