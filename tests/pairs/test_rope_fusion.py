"""rope-fusion with megatron-core's real wrappers: what a fused call asks for arrives at Transformer Engine."""

from importlib.metadata import version

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import TransformerConfig

import shim
from shim import testing
from shim.patches.megatron_core._proof_rotations import Group
from shim.patches.megatron_core.rope_fusion.proof import fused_and_unfused_rotations_on_a_gpu
from shim.testing.proof import Here, measure

CELLS = {"0.12.3+2.1.0": "all", "0.19.2+2.20.2": ["test_the_proof_for_a_gpu_measures_what_it_says"]}

ID = "rope-fusion"
if not hasattr(extension, "apply_rotary_pos_emb"):
    pytest.skip("this pair has no fused function without te-moved-symbols", allow_module_level=True)

TE = tuple(int(part) for part in version("transformer_engine").split(".")[:2])
MINOR = tuple(int(part) for part in testing.release().split(".")[:2])
LENGTHS = (4, 8, 12)
TOKENS = sum(LENGTHS)


@pytest.fixture
def arrived(monkeypatch):
    """What Transformer Engine's function is given, in the place of which this one stands."""
    given = []

    def apply_rotary_pos_emb(t, freqs, **options):
        given.append(options)
        return t

    monkeypatch.setattr(extension, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    return given


@pytest.fixture(scope="module", autouse=True)
def applied():
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield


@pytest.mark.skipif(TE < (2, 3), reason="Transformer Engine rotates packed rows only fused up to 2.2")
def test_the_proof_for_a_gpu_measures_what_it_says(monkeypatch):
    """With the unfused rotation of Transformer Engine instead of its kernels."""
    real = extension.apply_rotary_pos_emb
    unfused = lambda t, freqs, fused, **options: real(t, freqs, fused=False, **options)  # noqa: E731
    monkeypatch.setattr(extension, "apply_rotary_pos_emb", unfused)
    with shim.patched(exclude=[ID]):
        assert measure(fused_and_unfused_rotations_on_a_gpu, Here()).state == "wrong"
    patched = measure(fused_and_unfused_rotations_on_a_gpu, Here())
    assert patched.state == "right", patched


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ask", ["nothing", "interleaved", "mscale", "mla", "row per token"])
@pytest.mark.parametrize("form", ["unpacked", "packed"])
def test_all_of_it_arrives_or_nothing_does(form, ask, ranks, arrived, monkeypatch):
    """A Transformer Engine that cannot do it is an error of megatron-core's, which stays."""
    rank = ranks - 1
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: rank)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    config.apply_rope_fusion = True
    config.rotary_interleaved, config.multi_latent_attention = ask == "interleaved", ask == "mla"
    given = {} if MINOR < (0, 13) else {"cp_group": Group(ranks, rank)}
    if form == "packed":
        given |= {"t": torch.randn(TOKENS // ranks, 2, 16), "cu_seqlens": torch.tensor([0, 4, 12, 24]).int()}
    else:
        given["t"] = torch.randn(TOKENS, 1, 2, 16)
    given["freqs"] = torch.randn(TOKENS if form == "unpacked" or ask == "row per token" else 13, 1, 1, 8)
    if ask == "mscale":
        given["mscale"] = 1.25
    if ask == "mla" and MINOR >= (0, 19):
        given["mla_rotary_interleaved"] = True
    try:
        result = rope_utils.apply_rotary_pos_emb(config=config, **given)
    except (ValueError, AssertionError) as error:
        assert ask == "interleaved" and "Only TE >=" in str(error)
        return
    if not arrived:
        assert ask != "nothing"
        config.apply_rope_fusion = False
        assert torch.equal(result, rope_utils.apply_rotary_pos_emb(config=config, **given))
        return
    (options,) = arrived
    assert ask in ("nothing", "interleaved") or (ask == "row per token" and form == "unpacked")
    assert options.get("interleaved", False) == (ask == "interleaved") and options["fused"] is True
    if form == "packed":
        assert (options["cp_size"], options["cp_rank"]) == (ranks, rank) and options["cu_seqlens"] is not None
