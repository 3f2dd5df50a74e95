"""rope-thd: unfused packed rows are rotated without a loop, to the same bits."""

import contextlib
import functools
import inspect
import sys

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

import shim
from shim import testing
from shim._engine.factories import misfit
from shim.patches.megatron_core.rope_fusion import proof as rope_fusion_proof
from shim.patches.megatron_core.rope_thd import bindings
from shim.patches.megatron_core.rope_thd import proof as rope_thd_proof

CELLS = {"0.12.3": "all", "0.16.0": ["test_the_group_is_asked_for"]}

ID = "rope-thd"
MINOR = tuple(int(part) for part in testing.release().split(".")[:2])
HEADS, WIDTH, ROTARY = 2, 12, 8
LENGTHS = (4, 8, 12)  # multiples of four, so that two ranks can cut each by zigzag
TOKENS = sum(LENGTHS)
STOCK = {"_apply_rotary_pos_emb_thd": rope_utils._apply_rotary_pos_emb_thd}
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release has no loop")


@pytest.fixture(scope="module")
def applied():
    """The patch, once for all tests of this module that want it: binding it for each would take longer than they do."""
    if not NEEDED:
        pytest.skip("this release has no loop")
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield report


@pytest.fixture
def on_rank():
    """A function that says which rank of how many this is, and gives the argument that tells upstream."""
    with contextlib.ExitStack() as undo:
        yield lambda ranks=1, rank=0: undo.enter_context(rope_fusion_proof.on_rank(ranks, rank))


def table(rows):
    return torch.randn(rows, 1, 1, ROTARY, generator=torch.Generator().manual_seed(rows))


def offsets(lengths=LENGTHS):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_the_function_is_given_back(applied):
    """rope-fusion wraps the same one up to 0.14."""
    assert rope_utils._apply_rotary_pos_emb_thd is not STOCK["_apply_rotary_pos_emb_thd"]
    with shim.patched(exclude=[ID, "rope-fusion"]):
        assert rope_utils._apply_rotary_pos_emb_thd is STOCK["_apply_rotary_pos_emb_thd"]


FLAG = "mla_rotary_interleaved" if MINOR >= (0, 19) else "multi_latent_attention"
HOW = {"plain": {}, "interleaved": {"rotary_interleaved": True}, "mla": {FLAG: True}, "mscale": {"mscale": 1.25}}


def rotated(function, t, cu_seqlens, freqs, weights, **how):
    t = t.clone().requires_grad_()
    result = function(t, cu_seqlens, freqs, **how)
    (result * weights).sum().backward()
    return result, t.grad


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", ["positions", "tokens"])
@pytest.mark.parametrize("large", [False, True], ids=["", "in pieces"])
def test_packed_rows_keep_every_bit(how, dtype, rows, large, on_rank, applied, monkeypatch):
    """Forward and backward, on one, two and four ranks, with sequences of no length; large rows go in pieces."""
    if large:
        monkeypatch.setattr(sys.modules["shim.patches.megatron_core._packed_rotation"], "PIECE_BYTES", 64)
    # With no length and interleaving, releases that rotate each sequence raise.
    lengths = (8, 16, 24) if how == "interleaved" else (8, 0, 16, 24, 0)
    freqs = table(sum(lengths) if rows == "tokens" else 29)
    for ranks, rank in ((1, 0), (2, 0), (2, 1), (4, 0), (4, 3)):
        generator = torch.Generator().manual_seed(rank)
        t = torch.randn(sum(lengths) // ranks, HEADS, WIDTH, generator=generator).to(dtype)
        weights = torch.randn(t.shape, generator=generator).to(dtype)
        given = (t, offsets(lengths), freqs, weights)
        keywords = HOW[how] | on_rank(ranks, rank)
        mine, theirs = (
            rotated(f, *given, **keywords)
            for f in (rope_utils._apply_rotary_pos_emb_thd, STOCK["_apply_rotary_pos_emb_thd"])
        )
        assert all(map(torch.equal, mine, theirs)), (ranks, rank)


def test_large_packed_rows_take_no_more_memory_than_stock(on_rank, applied, monkeypatch):
    """Forward and backward together, in which a loop over many sequences holds little at a time."""
    monkeypatch.setattr(sys.modules["shim.patches.megatron_core._packed_rotation"], "PIECE_BYTES", 1024)
    peaks = []
    for function in rope_utils._apply_rotary_pos_emb_thd, STOCK["_apply_rotary_pos_emb_thd"]:
        t = torch.randn(1024, HEADS, WIDTH).requires_grad_() * 1
        with testing.Footprint() as footprint:
            result = function(t, offsets([64] * 16), table(65), **on_rank())
            torch.autograd.grad(result, t, torch.ones_like(result))
        peaks.append(footprint.peak_bytes / (t.numel() * t.element_size()))
    assert peaks[0] <= peaks[1] + 0.1


@pytest.mark.parametrize("lengths", [(4, 8), (TOKENS, 1), (TOKENS - 1,)], ids=["padding", "too long", "short"])
def test_offsets_that_do_not_fit_are_an_error(lengths, on_rank, applied):
    """As stock has it, which raises where it splits the row."""
    given = (torch.randn(TOKENS, HEADS, WIDTH), offsets(lengths), table(TOKENS + 1))
    for function in STOCK["_apply_rotary_pos_emb_thd"], rope_utils._apply_rotary_pos_emb_thd:
        with pytest.raises((ValueError, RuntimeError)):
            function(*given, **on_rank())


def test_a_table_that_is_too_short_is_an_error(on_rank, applied):
    given = (torch.randn(TOKENS, HEADS, WIDTH), offsets(), table(max(LENGTHS) - 1))
    for function in STOCK["_apply_rotary_pos_emb_thd"], rope_utils._apply_rotary_pos_emb_thd:
        with pytest.raises((IndexError, RuntimeError)):
            function(*given, **on_rank())


@needed
def test_a_release_with_an_argument_more_is_refused(on_rank):
    """A later one tells the rotation of packed rows their longest length: every row would be a TypeError."""
    stock = STOCK["_apply_rotary_pos_emb_thd"]
    signature = inspect.signature(stock)
    added = inspect.Parameter("max_seqlen", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)

    @functools.wraps(stock)
    def later(*args, max_seqlen=None, **kwargs):
        return stock(*args, **kwargs)

    later.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])
    factory = bindings(shim.plan()[ID].variant, {})[rope_utils.__name__ + ":_apply_rotary_pos_emb_thd"]
    with pytest.raises(TypeError, match="max_seqlen"):
        t = torch.randn(TOKENS, HEADS, WIDTH)
        factory(later)(t, offsets(), table(TOKENS), max_seqlen=1, **on_rank())
    assert misfit(factory(stock), stock) == ""
    assert "max_seqlen" in misfit(factory(later), later)


@pytest.mark.once
def test_proofs_tell_the_longest_length_to_a_release_that_asks_for_it(monkeypatch):
    """The dev branch asks for it, and takes a longer table for one with a row for each token."""
    stock = rope_utils.apply_rotary_pos_emb
    signature, asked = inspect.signature(stock), []

    def asks(*args, max_seqlen=None, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        if given.get("cu_seqlens") is not None:
            rows, tokens = given["freqs"].size(0), int(given["cu_seqlens"][-1])
            asked.append((max_seqlen is not None and rows > max_seqlen) == (rows == tokens))
            assert max_seqlen is not None
        return stock(*args, **kwargs)

    added = inspect.Parameter("max_seqlen", inspect.Parameter.KEYWORD_ONLY, default=None)
    named = {**signature.parameters, "max_seqlen": added}
    asks.__signature__ = signature.replace(parameters=list(named.values()))
    monkeypatch.setattr(rope_utils, "apply_rotary_pos_emb", asks)
    rope_thd_proof.refuse_other_bits("cpu")
    rope_thd_proof.operations_of(2, "cpu")
    with rope_fusion_proof.kernels():
        for ask in rope_fusion_proof.ASKED:
            rope_fusion_proof.error_of("packed", ask)
    assert len(asked) > 10 and all(asked)


@pytest.mark.skipif(MINOR < (0, 13), reason="0.12 has no argument cp_group")
def test_the_group_is_asked_for(applied):
    with pytest.raises(ValueError, match="cp_group"):
        rope_utils._apply_rotary_pos_emb_thd(torch.randn(TOKENS, HEADS, WIDTH), offsets(), table(TOKENS))
