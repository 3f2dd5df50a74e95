"""mla-packed-rope: a packed row is rotated as its sequences alone, and everything else is as on stock."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_latent_attention
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core import _proof_mla
from shim.patches.megatron_core.mla_packed_rope.proof import error, packed, row_and_states, tokens_of_rank
from shim.testing.proof import Here

CELLS = {"0.13.1": "all"}

ID = "mla-packed-rope"
pytestmark = needed(ID)
kinds = pytest.mark.parametrize("kind", ["rope", "yarn"])
HERE = Here(world=2)
CP = testing.Layout(cp=2)
LENGTHS = [4, 20, 4]


def applied():
    return shim.patched(only=[ID], require=[ID])


def unpacked(kind, active=False):
    """Of a row that is not packed, on this rank, before and after one that is."""
    with applied() if active else contextlib.nullcontext(), _proof_mla.without_te() as module, torch.no_grad():
        ranks = parallel_state.get_context_parallel_world_size()
        layer = _proof_mla.build(module, context_parallel_size=ranks, rope_type=kind)
        states = torch.randn(16 // ranks, 1, _proof_mla.HIDDEN, generator=torch.Generator().manual_seed(3))
        before = layer(states, None)[0]
        if active:
            row, tokens = row_and_states([16])
            layer(tokens[tokens_of_rank(row)], None, packed_seq_params=row.packed_seq_params())
        return before, layer(states, None)[0]


@kinds
def test_unpacked_rows_are_as_on_stock_also_after_a_packed_one(kind):
    """Their tables, which are cut for the rank, are cached apart."""
    for found, stock in zip(
        HERE.run(unpacked, kind, True, layout=CP), HERE.run(unpacked, kind, layout=CP), strict=True
    ):
        assert all(map(torch.equal, found, stock))


@kinds
def test_packed_rows_of_one_rank_are_as_on_stock(one_rank, kind):
    stock = packed(LENGTHS, 4, None, {"rope_type": kind})
    with applied():
        found = packed(LENGTHS, 4, None, {"rope_type": kind})
    assert all(torch.equal(found[place], stock[place]) for place in stock)


@kinds
@pytest.mark.parametrize(
    ("lengths", "longest"),
    [(LENGTHS, None), (LENGTHS, 21), ([8, 8, 8], 64), ([5, 9, 2], None), ([28], None)],
    ids=["longer than the rank's row", "no whole rows", "longer than the row", "padded", "one"],
)
def test_each_sequence_is_as_alone(kind, lengths, longest):
    with applied():
        assert error(HERE, lengths, ranks=2, longest=longest, rope_type=kind) < 1e-5


@kinds
def test_beside_all_patches(kind):
    """The rotation of a whole row, and a patch outside of this one."""
    with shim.patched(require=[ID]):
        assert error(HERE, LENGTHS, ranks=2, rope_type=kind) < 1e-5
        assert error(HERE, [5, 9, 2], ranks=2, rope_type=kind) < 1e-5


def gradients(packs, settings):
    """Of all weights, summed over ranks, for a loss on all tokens."""
    row, states = row_and_states(LENGTHS)
    weights = torch.randn(row.total, _proof_mla.HIDDEN, generator=torch.Generator().manual_seed(5))
    with _proof_mla.without_te() as module:
        ranks = parallel_state.get_context_parallel_world_size()
        layer = _proof_mla.build(module, context_parallel_size=ranks, **settings)
        places = [tokens_of_rank(row)] if packs else [torch.arange(row.total)[s : s + n] for s, n in row.spans]
        for mine in places:
            how = {"packed_seq_params": row.packed_seq_params()} if packs else {}
            (layer(states[mine], None, **how)[0].flatten(1) * weights[mine]).sum().backward()
    return torch.cat([weight.grad.flatten() for _, weight in sorted(layer.named_parameters())])


@kinds
@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_are_those_of_the_sequences_alone(kind, recomputes):
    """Also if the up-projection is recomputed, which has to find its table again."""
    settings = {"rope_type": kind}
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]} if recomputes else {}
    (right,) = HERE.run(gradients, False, settings)
    with applied():
        found = sum(HERE.run(gradients, True, settings | recompute, layout=CP))
    assert (found - right).norm() < 1e-5 * right.norm()


def after_an_exception(kind):
    """Whether the attention has its own embedding, and no other, after a call that raises."""
    with applied(), _proof_mla.without_te() as module:
        layer = _proof_mla.build(module, context_parallel_size=2, rope_type=kind)
        embedding, group = layer.rotary_pos_emb, layer.rotary_pos_emb.cp_group
        layer.linear_kv_up_proj.register_forward_pre_hook(functools.partial(fails, layer))
        row, states = row_and_states(LENGTHS)
        with pytest.raises(ArithmeticError, match="Called"):
            layer(states[tokens_of_rank(row)], None, packed_seq_params=row.packed_seq_params())
        return layer.rotary_pos_emb is embedding and "rotary_pos_emb" not in vars(layer) and embedding.cp_group is group


def fails(layer, *_):
    raise ArithmeticError(type(layer.rotary_pos_emb).__name__)


@kinds
def test_the_attention_keeps_its_embedding_also_after_an_exception(kind):
    assert HERE.run(after_an_exception, kind, layout=CP) == [True, True]


@pytest.mark.usefixtures("one_rank")
def test_a_table_with_a_row_for_each_sequence_is_as_on_stock():
    """[s, b, 1, d], and nothing is packed."""
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=True)
    queries, table = torch.randn(2, 4, 2, 1, 8, generator=torch.Generator().manual_seed(4))
    stock = multi_latent_attention.apply_rotary_pos_emb(queries, table, config)
    with applied():
        assert torch.equal(multi_latent_attention.apply_rotary_pos_emb(queries, table, config), stock)
