"""mrope-thd: long sequences, full recompute and fused rotations; and what the patch leaves to upstream."""

import contextlib
import importlib
from unittest import mock

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core import mrope_thd
from shim.patches.megatron_core.mrope_thd.proof import LENGTHS, build, error, packed, packed_of, row_of, unpacked
from shim.patches.megatron_core.rope_fusion.proof import kernels

CELLS = {
    "0.12.3": "all",
    "0.17.1": ["test_packed_rows_on_one_rank_stay", "test_an_embedding_with_a_forward_of_its_own_is_left_alone"],
}

ID = "mrope-thd"
VARIANT = shim.plan()[ID].variant
EARLY = VARIANT in ("v0_12", "v0_13")
pytestmark = pytest.mark.skipif(VARIANT is None, reason="this release needs no patch")

LONG = (8, 24)  # the second is longer than the part of one of two ranks
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def patched(active=True, *more):
    ids = [ID, *more]
    return shim.patched(only=ids, require=ids) if active else contextlib.nullcontext()


def on_ranks(cp, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(cp=cp)):
        return function(*args)


def with_patch(active, function, lengths, overrides):
    with patched(active):
        return function(lengths, overrides)


def truth(lengths=LENGTHS):
    return on_ranks(1, with_patch, False, unpacked, lengths, {})


def test_a_sequence_longer_than_the_part_of_a_rank(ranks2):
    """Under full recompute: the table is made outside of what is recomputed."""
    overrides = {"context_parallel_size": 2, **RECOMPUTE}
    found = ranks2.run(on_ranks, 2, with_patch, True, packed, LONG, overrides)
    assert error(found, truth(LONG)) <= 1e-5


def fused(lengths, overrides):
    """packed, with stand-ins for the fused kernels; how often the kernel of packed rows ran."""
    plain = build(**overrides)
    plain.config.apply_rope_fusion = True  # the constructor refuses it without Transformer Engine
    beside = [] if EARLY else ["rope-fusion"]
    with kernels() as given, mock.patch(f"{packed.__module__}.build", lambda **_: plain), patched(True, *beside):
        return packed(lengths, overrides), given


@pytest.mark.parametrize("cp", [1, 2])
def test_fused_rotations_beside_rope_fusion(ranks2, cp):
    overrides = {"context_parallel_size": cp}
    arguments = (on_ranks, cp, fused, LENGTHS, overrides)
    results = ranks2.run(*arguments) if cp == 2 else [on_ranks(*arguments[1:])]
    assert error([found for found, _ in results], truth()) <= 1e-5
    for _, given in results:
        # Up to 0.14 a kernel rotates the row as an unpacked one; later rope-fusion makes the call unfused.
        assert bool(given) == EARLY


def test_positions_that_begin_elsewhere_in_each_sequence():
    """As where a sequence goes on. A table whose sequences do not begin alike is one for each token all the same."""
    model = on_ranks(1, build)
    ids, labels, places = row_of()
    places[..., 8:] += 3
    alone = [slice(0, 8), slice(8, 16), slice(16, 24)]

    def losses():
        with patched():
            together = model(ids, places, None, labels=labels, packed_seq_params=packed_of(LENGTHS))
            parts = [model(ids[:, s], places[..., s], None, labels=labels[:, s]) for s in alone]
            return together, torch.cat(parts, 1)

    together, right = on_ranks(1, losses)
    assert torch.allclose(together, right, atol=1e-6)


def same(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("overrides", [{}, {"position_embedding_type": "rope"}])
def test_unpacked_rows_and_other_positions_stay(ranks2, overrides):
    """Under context parallelism: unpacked rows with mrope, and packed rows with plain positions."""
    function = packed if overrides else unpacked
    if not overrides and VARIANT == "v0_12":
        pytest.skip("upstream cuts the wrong dimension")
    given = {"context_parallel_size": 2, **overrides}
    found = ranks2.run(on_ranks, 2, with_patch, True, function, LENGTHS, given)
    stock = ranks2.run(on_ranks, 2, with_patch, False, function, LENGTHS, given)
    assert all(map(same, found, stock))


@pytest.mark.skipif(EARLY, reason="upstream takes the rows of other tokens")
def test_packed_rows_on_one_rank_stay():
    found, stock = (on_ranks(1, with_patch, active, packed, LENGTHS, {}) for active in (True, False))
    assert same(found, stock)


def cut_by_an_embedding_of_its_own(lengths):
    """The sizes of the table that an embedding with a forward of its own has made, and cut as upstream does."""
    embeddings = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    model = build(context_parallel_size=2)
    sizes = []

    class Own(embeddings.MultimodalRotaryEmbedding):
        def forward(self, position_ids, mrope_section, **kwargs):
            table = super().forward(position_ids, mrope_section, **kwargs)
            sizes.append(table.size(0))
            raise InterruptedError

    model.rotary_pos_emb.__class__ = Own
    ids, labels, places = row_of(lengths)
    with patched(), pytest.raises(InterruptedError):
        model(ids[:, :12], places, None, labels=labels[:, :12], packed_seq_params=packed_of(lengths))
    assert not mrope_thd._PACKED.value
    return sizes


@pytest.mark.skipif(VARIANT == "v0_12", reason="upstream's table cannot be cut")
def test_an_embedding_with_a_forward_of_its_own_is_left_alone(ranks2):
    assert ranks2.run(on_ranks, 2, cut_by_an_embedding_of_its_own, LENGTHS) == [[12], [12]]


@pytest.mark.parametrize(
    ("positions", "ranks", "state"), [("rope", 2, "applied"), ("mrope", 1, "applied"), ("mrope", 2, "unknown")]
)
def test_check_on_a_model_that_makes_the_table_itself(positions, ranks, state):
    """As that of mcore-bridge. With a plain table or on one rank there is nothing to fix in the method."""
    method = "forward" if VARIANT == "v0_12" else "_preprocess"

    def state_of():
        model = build(position_embedding_type=positions)
        model.config.context_parallel_size = ranks
        own = {method: lambda self, *args, **kwargs: None}
        model.__class__ = type("Own", (type(model),), own)
        with shim.patched(only=[ID]):
            return shim.check(model)[ID].state

    assert on_ranks(1, state_of) == state


@pytest.mark.skipif(VARIANT == "v0_16", reason="nothing is kept between calls")
def test_an_exception_leaves_no_mark():
    def fails():
        model, ids = build(), row_of()[0]
        with patched(), pytest.raises(AttributeError):
            model(ids, None, None, packed_seq_params=packed_of(LENGTHS))
        return mrope_thd._PACKED.value, mrope_thd._EMBEDDING.value

    assert on_ranks(1, fails) == (None, None)
