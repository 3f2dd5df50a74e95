"""mrope-rotary-interleaved: packed rows and other layouts, the angles of any sections, and what others override."""

import threading
import types

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

import shim
from shim import testing
from shim.patches.megatron_core.mrope_rotary_interleaved.proof import (
    build,
    build_multimodal,
    image,
    rows,
    step,
    text,
)
from shim.patches.megatron_core.mrope_thd.proof import LENGTHS, error, packed, unpacked

CELLS = {"0.12.3": "all"}

ID = "mrope-rotary-interleaved"
NEEDED = shim.plan()[ID].wanted
pytestmark = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")

PAIRS = {"rotary_interleaved": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def patched(layout, function, *args):
    """With mrope-thd, which cuts tables that are not packed right in 0.12, and leaves those of packed rows whole."""
    ids = [ID, "mrope-thd"]
    with (
        testing.megatron_on_cpu(),
        testing.layout_initialised(testing.Layout(**layout)),
        shim.patched(only=ids, require=ids),
    ):
        return function(*args)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("function", [packed, unpacked])
def test_packed_rows_and_context_parallel_ranks(ranks2, function, cp):
    """Losses and gradients are those of each sequence alone on one rank."""
    truth = patched({}, unpacked, LENGTHS, PAIRS)
    overrides = {**PAIRS, "context_parallel_size": cp}
    found = ranks2.run(patched, {"cp": cp}, function, LENGTHS, overrides)
    assert error(found[:cp], truth) <= 1e-5


def losses(**overrides):
    ids, labels = rows()
    return build_multimodal(**overrides)(ids, image(), None, labels=labels).detach()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(ranks2, sequence_parallel):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    expected = patched({}, losses)
    for found in ranks2.run(patched, {"tp": 2, "sequence_parallel": sequence_parallel}, losses_of, parallel):
        assert torch.allclose(found, expected, atol=1e-5)


def losses_of(overrides):
    return losses(**overrides)


def steps_on(build_one, positions, *overrides):
    return [step(build_one(**given), positions) for given in overrides]


def test_full_recompute_has_the_same_bits():
    found, expected = patched({}, steps_on, build_multimodal, image(), RECOMPUTE, {})
    assert torch.equal(found, expected)


def test_rows_of_few_tokens():
    """One token is no error of a view on stock, and three have the size of its table by chance."""
    with testing.layout_initialised(testing.Layout()), shim.patched(only=[ID], require=[ID]):
        for tokens in (1, 3, 4):
            found = embedding(True)(text()[..., :tokens], [2, 1, 1])
            plain = build().rotary_pos_emb(tokens)
            assert torch.equal(found, plain.expand_as(found))


def embedding(pairs, dim=8, **more):
    return MultimodalRotaryEmbedding(dim, 1.0, rotary_interleaved=pairs, **more)


@pytest.mark.parametrize("sections", [[2, 1, 1], [1, 1, 2], [0, 4, 0], [1, 1, 1, 1, 0, 0]])
@pytest.mark.parametrize("more", [{}, {"seq_len_interpolation_factor": 4.0}])
def test_angles_are_those_of_halves(sections, more):
    """Each stands twice in a row. Halves keep the table that stock makes, to its bits."""
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        stock = embedding(False, **more)(image(), sections)
        with shim.patched(only=[ID], require=[ID]):
            assert torch.equal(embedding(False, **more)(image(), sections), stock)
            found = embedding(True, **more)(position_ids=image(), mrope_section=sections)
    assert found.is_contiguous()
    assert torch.equal(found[..., ::2], stock[..., :4]) and torch.equal(found[..., 1::2], stock[..., :4])


def test_the_price_is_one_copy_of_the_table():
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()), shim.patched(only=[ID]):
        counts = []
        for pairs in (False, True):
            table = embedding(pairs)
            table(image(), [2, 1, 1])
            with testing.Footprint() as footprint:
                table(image(), [2, 1, 1])
            counts.append(footprint.operations)
    assert counts[1] - counts[0] <= 3  # two views beside it


def test_the_embedding_stays_as_it_is_meanwhile():
    """Other threads and what it calls see it as it was, also after an exception."""
    seen = []

    class Positions:
        """Stands for position_ids, and looks at the embedding from another thread."""

        def to(self, **where):
            thread = threading.Thread(target=lambda: seen.append(table.rotary_interleaved))
            thread.start()
            thread.join()
            raise InterruptedError

    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()), shim.patched(only=[ID]):
        table = embedding(True)
        before = dict(vars(table))
        with pytest.raises(InterruptedError):
            table(Positions(), [2, 1, 1])
    assert seen == [True] and vars(table) == before


def test_torch_compile_needs_no_break():
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()), shim.patched(only=[ID]):
        table = embedding(True)
        expected = table(image(), [2, 1, 1])
        compiled = torch.compile(table.forward, fullgraph=True, backend="eager")
        assert torch.equal(compiled(image(), [2, 1, 1]), expected)
    torch.compiler.reset()


def angles_of(self, position_ids, columns, sections):
    """[3, b, s, columns] of time, height and width; each section takes one of them."""
    places = position_ids.to(self.inv_freq.dtype) / (self.seq_len_interpolation_factor or 1)
    cut = (places[..., None] * columns).split(sections, -1)
    return torch.cat([part[i % 3] for i, part in enumerate(cut)], -1).transpose(0, 1)[:, :, None]


class InPairs(MultimodalRotaryEmbedding):
    """As that of mcore-bridge."""

    def forward(self, position_ids, mrope_section, **kwargs):
        return angles_of(self, position_ids, self.inv_freq, mrope_section).repeat_interleave(2, -1)


class SectionsOfColumns(MultimodalRotaryEmbedding):
    """As that of the dev branch."""

    def forward(self, position_ids, mrope_section, **kwargs):
        return angles_of(self, position_ids, self.inv_freq.repeat_interleave(2), mrope_section * 2)


class WithItsModel(MultimodalRotaryEmbedding):
    def forward(self, position_ids, mrope_section, model, **kwargs):
        raise NotImplementedError


def right_on_images(model):
    """Whether the table has pairs of the angles that halves have."""
    halves = embedding(False)(image(), [2, 1, 1])
    return torch.equal(model.rotary_pos_emb(image(), [2, 1, 1]), halves[..., :4].repeat_interleave(2, -1))


@pytest.mark.parametrize(
    ("override", "pairs", "state", "right"),
    [
        (InPairs, True, "applied", True),
        (SectionsOfColumns, True, "shadowed", False),
        (SectionsOfColumns, False, "applied", None),  # whatever it does, this is not the defect
        (WithItsModel, True, "unknown", None),
    ],
)
@pytest.mark.parametrize("interpolation", [None, 4.0])
def test_check_tries_an_embedding_with_a_forward_of_its_own(override, pairs, state, right, interpolation):
    """On the class, and bound to the instance."""
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()), shim.patched(only=[ID]):
        derived, bound = (build_multimodal(rotary_interleaved=pairs) for _ in range(2))
        derived.rotary_pos_emb.__class__ = override
        bound.rotary_pos_emb.forward = types.MethodType(override.forward, bound.rotary_pos_emb)
        for model in (derived, bound):
            if interpolation is None and right is not None:
                assert right_on_images(model) == right
            model.rotary_pos_emb.seq_len_interpolation_factor = interpolation
            assert shim.check(model)[ID].state == state
