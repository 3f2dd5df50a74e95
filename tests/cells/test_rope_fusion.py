"""rope-fusion: a fused call is told all that it is asked for, or not made."""

import contextlib
import threading

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils, yarn_rotary_pos_embedding
from megatron.core.transformer import attention
from packaging.version import Version

import shim
from shim import testing
from shim.patches.megatron_core._proof_rotations import HEADS, LENGTHS, WIDTH, config_of, offsets, table, takes
from shim.patches.megatron_core.rope_fusion import proof as rope_fusion_proof
from shim.patches.megatron_core.rope_fusion.proof import TOKENS

CELLS = {"0.13.1": "all", "0.19.2": ["test_fused_single_qkv_rope_ignores_what_it_is_asked"]}

ID = "rope-fusion"
RELEASE = Version(testing.release()).release[:3]
TELLS_LONGEST = takes("max_seqlen")
if RELEASE >= (0, 20, 0) and not TELLS_LONGEST:
    RELEASE = (0, 19, 99)  # a commit after 0.19, before all that 0.20 has
MINOR = RELEASE[:2]
# The first release that is right, by format and by what is asked for beside a plain rotation; None: none of them.
RIGHT_FROM = {
    ("unpacked", "interleaved"): (0, 12, 1),
    ("unpacked", "mscale"): (0, 16, 0),
    ("unpacked", "mla"): (0, 19, 0),
    ("packed", "interleaved"): (0, 17, 0),
    ("packed", "mscale"): (0, 20, 0),
    ("packed", "mla"): (0, 20, 0),
    ("packed", "row per token"): None,
}
# One row per token is what the unfused function takes from 0.15; before, it counts like the kernel, and both are wrong.
IS_RIGHT = {key: bool(first and first <= RELEASE) for key, first in RIGHT_FROM.items()}
IS_RIGHT["packed", "row per token"] = MINOR < (0, 15)
CASES = list(IS_RIGHT)
# In a dictionary, because shim rebinds names at the top of a module.
STOCK = {name: getattr(rope_utils, name) for name in ("apply_rotary_pos_emb", "_apply_rotary_pos_emb_thd")}

of_each_case = pytest.mark.parametrize("case", CASES, ids=" ".join)
tells_longest = pytest.mark.skipif(not TELLS_LONGEST, reason="max_seqlen came with 0.20")
has_fused_qkv = pytest.mark.skipif(MINOR < (0, 15), reason="fused_single_qkv_rope came with 0.15")


@pytest.fixture(scope="module")
def applied():
    """The patch, once for all tests of this module that want it: binding it for each would take longer than they do."""
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield report


@pytest.fixture
def stock():
    """Without the patch, in whatever order tests run; these come first, because switching it off takes a while."""
    is_stock = rope_utils.apply_rotary_pos_emb is STOCK["apply_rotary_pos_emb"]
    with contextlib.nullcontext() if is_stock else shim.patched(exclude=[ID]):
        assert rope_utils.apply_rotary_pos_emb is STOCK["apply_rotary_pos_emb"]
        yield


@pytest.fixture
def on_rank():
    """A function that says which rank of how many this is, and gives the argument that tells upstream."""
    with contextlib.ExitStack() as undo:
        yield lambda ranks=1, rank=0: undo.enter_context(rope_fusion_proof.on_rank(ranks, rank))


@pytest.fixture
def kernels():
    """Stand-ins for the fused functions, and what they were given."""
    with rope_fusion_proof.kernels() as given:
        yield given


def call_of(case, on_rank, ranks=1, rank=0):
    """Arguments of apply_rotary_pos_emb, without the config."""
    return rope_fusion_proof.call_of(*case, ranks, rank) | on_rank(ranks, rank)


def unfused(config, given):
    plain = config_of()
    plain.__dict__.update(config.__dict__, apply_rope_fusion=False)
    return STOCK["apply_rotary_pos_emb"](config=plain, **given)


@pytest.fixture
def qkv_calls(monkeypatch):
    """A stand-in for the function behind fused_single_qkv_rope: it rotates as it is told, and records the call."""
    calls = []

    def fused(qkv, q_freqs, k_freqs, sizes, tensor_format="sbhd", start_positions=None, interleaved=False):
        calls.append(interleaved)
        query, key, value = (part.reshape(*qkv.shape[:2], -1, sizes[-1]) for part in torch.split(qkv, sizes, dim=-1))
        rotate = rope_utils._apply_rotary_pos_emb_bshd
        return rotate(query, q_freqs, interleaved), rotate(key, k_freqs, interleaved), value

    monkeypatch.setattr(attention, "apply_fused_qkv_rotary_pos_emb", fused, raising=False)
    monkeypatch.setattr(attention, "HAVE_FUSED_QKV_ROPE", True, raising=False)
    return calls


def output_of_attention(ask, fused):
    with testing.layout_initialised(testing.Layout()):
        fields = {"rotary_interleaved": True} if ask == "interleaved" else {}
        model = testing.build_gpt(mtp_num_layers=None, num_layers=1, **fields)
        if ask == "yarn":
            config = model.config
            config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim = 40.0, 1.0, 0.0
            factor = yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config(config)
            model.decoder.layers[0].self_attention._yarn_concentration_factor = factor  # as later releases keep it
        model.config.fused_single_qkv_rope = fused
        inputs = {"input_ids": torch.arange(16)[None], "position_ids": torch.arange(16)[None]}
        return model(**inputs, attention_mask=None).detach()


@of_each_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_stock_ignores_what_it_is_asked(case, ranks, kernels, on_rank, stock):
    """The table of the patch, measured: the kernel is called, and its result is not the one asked for."""
    given, config = call_of(case, on_rank, ranks, ranks - 1), config_of(case[1])
    result = rope_utils.apply_rotary_pos_emb(config=config, **given)
    is_right = torch.allclose(result, unfused(config, given), atol=1e-5)
    assert is_right == IS_RIGHT[case]
    assert is_right or kernels


@has_fused_qkv
@pytest.mark.parametrize("ask", ["nothing", "interleaved", "yarn"])
def test_fused_single_qkv_rope_ignores_what_it_is_asked(ask, qkv_calls):
    """Not covered, as the patch says: where this fails, upstream has fixed it."""
    fused, plain = (output_of_attention(ask, fused) for fused in (True, False))
    assert torch.allclose(fused, plain, atol=1e-6) == (ask == "nothing") and qkv_calls == [False]


@of_each_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_such_a_call_is_not_fused(case, ranks, kernels, on_rank, applied):
    """Bit for bit the unfused result, and the kernel is not called; where stock is right, it is called as before."""
    given, config = call_of(case, on_rank, ranks, ranks - 1), config_of(case[1])
    before = dict(vars(config))
    result = rope_utils.apply_rotary_pos_emb(config=config, **given)
    assert vars(config) == before
    if IS_RIGHT[case] and case != ("packed", "row per token"):
        calls = list(kernels)
        assert torch.equal(result, STOCK["apply_rotary_pos_emb"](config=config, **given)) and kernels == 2 * calls
    else:
        assert torch.equal(result, unfused(config, given)) and kernels == []


@pytest.mark.parametrize("form", ["unpacked", "packed"])
def test_a_plain_call_stays_fused(form, kernels, on_rank, applied):
    """What the kernels can do, they do; and a row with one sequence needs no row per token."""
    config = config_of()
    given = call_of((form, "nothing"), on_rank)
    assert torch.allclose(rope_utils.apply_rotary_pos_emb(config=config, **given), unfused(config, given), atol=1e-5)
    if form == "packed":
        given |= {"cu_seqlens": offsets([TOKENS]), "freqs": table(TOKENS)}
        rope_utils.apply_rotary_pos_emb(config=config, **given)
    assert kernels == [(form, False)] * (1 if form == "unpacked" else 2)


@pytest.mark.parametrize("case", [("unpacked", "interleaved"), ("packed", "row per token")], ids=" ".join)
def test_a_missing_kernel_is_upstreams_error(case, monkeypatch, on_rank, applied):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None)
    with pytest.raises((AssertionError, ImportError), match="not available"):
        rope_utils.apply_rotary_pos_emb(config=config_of(case[1]), **call_of(case, on_rank))


def test_the_shared_config_never_changes(kernels, on_rank, applied, monkeypatch):
    """Not even during the call, as another thread sees it."""
    config, seen = config_of(), []
    upstream = rope_utils._apply_rotary_pos_emb_bshd

    def looking(*args, **kwargs):
        thread = threading.Thread(target=lambda: seen.append(config.apply_rope_fusion))
        thread.start()
        thread.join()
        return upstream(*args, **kwargs)

    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", looking)
    rope_utils.apply_rotary_pos_emb(config=config, **call_of(("packed", "row per token"), on_rank))
    assert set(seen) == {True} and kernels == []


def test_an_exception_leaves_the_config_alone(kernels, on_rank, applied, monkeypatch):
    config, given = config_of(), call_of(("packed", "row per token"), on_rank)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rope_utils.apply_rotary_pos_emb(config=config, **given)
    assert config.apply_rope_fusion is True and kernels == []


def test_aliases_are_rebound_and_restored(applied):
    """Attention took the function by name."""
    names = [rope_utils, attention]
    assert all(module.apply_rotary_pos_emb is not STOCK["apply_rotary_pos_emb"] for module in names)
    decisions = shim.plan().decisions
    on_it = [id for id in decisions if any("apply_rotary_pos_emb" in target for target in decisions[id].targets)]
    with shim.patched(exclude=on_it):
        assert all(module.apply_rotary_pos_emb is STOCK["apply_rotary_pos_emb"] for module in names)


@tells_longest
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("longest", [max(LENGTHS), TOKENS], ids=["longest", "whole row"])
def test_the_longest_length_says_what_the_table_is(longest, ranks, kernels, on_rank, applied):
    """As for the unfused function: a row of the table per token, unless no table of positions could be shorter."""
    given = call_of(("packed", "row per token"), on_rank, ranks, ranks - 1) | {"max_seqlen": longest}
    config = config_of()
    result, right = rope_utils.apply_rotary_pos_emb(config=config, **given), unfused(config, given)
    assert torch.allclose(result, right, atol=1e-5)
    assert len(kernels) == (longest == TOKENS)
    STOCK["apply_rotary_pos_emb"](config=config, **given)
    assert kernels[-1] == ("packed", False)


@tells_longest
@pytest.mark.parametrize("form", ["unpacked", "packed"])
def test_stock_rotates_backwards_unfused(form, kernels, on_rank, applied):
    """The kernels cannot, and are not asked to."""
    given, config = call_of((form, "nothing"), on_rank) | {"inverse": True}, config_of()
    for function in STOCK["apply_rotary_pos_emb"], rope_utils.apply_rotary_pos_emb:
        assert torch.equal(function(config=config, **given), unfused(config, given)) and kernels == []


def test_the_decision_compiles_in_one_graph(kernels, on_rank, applied):
    ask = "mla" if MINOR < (0, 19) else "nothing"  # from 0.19 on nothing is left to decide for unpacked rows
    config, given = config_of(ask), call_of(("unpacked", ask), on_rank)
    compiled = torch.compile(rope_utils.apply_rotary_pos_emb, fullgraph=True, backend="eager")
    assert torch.equal(compiled(config=config, **given), unfused(config, given))
    assert len(kernels) == (ask == "nothing")


# Unfused packed rows, up to 0.14


@pytest.mark.skipif(MINOR >= (0, 15), reason="stock takes the row of the token from 0.15")
@pytest.mark.parametrize("per_token", [True, False], ids=["tokens", "positions"])
def test_unfused_packed_rows_take_the_row_that_the_table_has_for_them(per_token, on_rank, applied):
    """One per token where every sequence begins with the first one's row. With a row per position, stock is right."""
    by_position = table(TOKENS)
    freqs = torch.cat([by_position[:length] for length in LENGTHS]) if per_token else by_position
    t = torch.randn(TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    pieces = zip(t.split(LENGTHS), LENGTHS, strict=True)
    alone = torch.cat([rotate(piece.unsqueeze(1), by_position[:length]).squeeze(1) for piece, length in pieces])
    functions = rope_utils._apply_rotary_pos_emb_thd, STOCK["_apply_rotary_pos_emb_thd"]
    found, stock = (function(t, offsets(), freqs, **on_rank()) for function in functions)
    assert torch.equal(found, alone)
    assert torch.equal(stock, alone) != per_token


# Whole models


def gradients(fused, ask="interleaved", **recompute):
    """Of a model on a packed row; `fused` also where what is asked for would be ignored."""
    with testing.layout_initialised(testing.Layout()):
        model = testing.build_gpt(mtp_num_layers=None, **recompute)
        model.config.rotary_interleaved = ask == "interleaved"
        model.config.apply_rope_fusion = fused
        result = testing.run_packed(model, testing.pack(testing.random_sequences((6, 8, 4)), align=2))
        assert model.config.apply_rope_fusion is fused
        return result.grads


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
def test_a_model_trains_as_without_fusion(recompute, kernels, applied):
    """In the recompute of full activation recompute too."""
    if IS_RIGHT["packed", "interleaved"]:
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*(gradients(f).values() for f in (True, False))))
        assert kernels
    else:
        assert equal(gradients(True, **recompute), gradients(False)) and kernels == []
