"""Real fused rotations on a GPU: with rope-fusion no call gives anything but the unfused result.

Nothing of Transformer Engine or megatron-core is imported before a test runs, so that this file is collected anywhere.
"""

import copy

import pytest
import torch

import shim

pytestmark = pytest.mark.gpu

ID, ROWS = "rope-fusion", "rope-thd"
HEADS, WIDTH, ROTARY = 2, 64, 32
LENGTHS = (8, 16, 24)
TOKENS = sum(LENGTHS)
ASKED = ["nothing", "interleaved", "mscale", "mla", "row per token"]


class Group:
    def __init__(self, ranks, rank):
        self._ranks, self._rank = ranks, rank

    def size(self):
        return self._ranks

    def rank(self):
        return self._rank


@pytest.fixture
def rope(monkeypatch):
    """rope_utils with the patch, and a function that says which rank this is."""
    from megatron.core.models.common.embeddings import rope_utils

    with shim.patched(only=[ID, ROWS], require=[ID]) as report:
        if report[ID].state == "out-of-range":
            pytest.skip(report[ID].reason)

        def on_rank(ranks, rank):
            state = rope_utils.parallel_state
            monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: ranks)
            monkeypatch.setattr(state, "get_context_parallel_rank", lambda: rank)
            takes_group = "cp_group" in rope_utils.apply_rotary_pos_emb.__wrapped__.__code__.co_varnames
            return {"cp_group": Group(ranks, rank)} if takes_group else {}

        yield rope_utils, on_rank


def config_of(ask):
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    config.apply_rope_fusion = True
    config.rotary_interleaved = ask == "interleaved"
    config.multi_latent_attention = ask == "mla"
    return config


def call_of(form, ask, ranks):
    packed = form == "packed"
    rows = TOKENS if not packed or ask == "row per token" else max(LENGTHS) + 1
    positions = torch.arange(rows, device="cuda")[:, None] / torch.arange(1, ROTARY // 2 + 1, device="cuda")
    given = {"freqs": torch.cat([positions, positions], dim=-1)[:, None, None]}
    shape = (TOKENS // ranks, HEADS, WIDTH) if packed else (TOKENS, 2, HEADS, WIDTH)
    given["t"] = torch.randn(shape, device="cuda", requires_grad=True)
    if packed:
        given["cu_seqlens"] = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    if ask == "mscale":
        given["mscale"] = 1.25
    return given


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("form", ["unpacked", "packed"])
def test_fused_and_unfused_agree(form, ask, ranks, rope):
    """On every rank, forward and backward; what differs is rounding."""
    module, on_rank = rope
    for rank in range(ranks if form == "packed" else 1):
        given = call_of(form, ask, ranks) | on_rank(ranks if form == "packed" else 1, rank)
        if ask == "mla" and "mla_rotary_interleaved" in module.apply_rotary_pos_emb.__wrapped__.__code__.co_varnames:
            given["mla_rotary_interleaved"] = True
        config = config_of(ask)
        plain = copy.copy(config)
        plain.apply_rope_fusion = False
        results = []
        for each in (config, plain):
            result = module.apply_rotary_pos_emb(config=each, **given)
            results.append((result, *torch.autograd.grad(result.square().sum(), given["t"])))
        for fused, unfused in zip(*results):
            torch.testing.assert_close(fused, unfused, atol=1e-4, rtol=1e-4)
        assert config.apply_rope_fusion is True


def test_unfused_packed_rows_do_not_make_the_host_wait(rope):
    module, on_rank = rope
    config = config_of("mscale")
    given = call_of("packed", "mscale", 1) | on_rank(1, 0)
    module.apply_rotary_pos_emb(config=config, **given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.apply_rotary_pos_emb(config=config, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
