"""rope-fusion: functions of others in the place of upstream's are tried for what they are asked for."""

from types import SimpleNamespace

import pytest
import torch
from foreign_functions import state_beside
from megatron.core.models.common.embeddings import rope_utils

from shim import testing
from shim._engine.models import run
from shim.patches.megatron_core._proof_rotations import config_of
from shim.patches.megatron_core.rope_fusion import probe
from shim.patches.megatron_core.rope_fusion.proof import kernels

CELLS = {"0.12.0": "all"}
ABOUT = []

ID = "rope-fusion"
TARGET = rope_utils.__name__ + ":apply_rotary_pos_emb"
MINOR = tuple(int(part) for part in testing.release().split(".")[:2])
STOCK = {"apply_rotary_pos_emb": rope_utils.apply_rotary_pos_emb}  # where shim rebinds no name


def rotation(obeys=()):
    """A function of a trainer, which never fuses, and obeys what it is asked for by these arguments and fields."""

    def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, **how):
        mla = how.get("mla_rotary_interleaved", config.multi_latent_attention)
        if cu_seqlens is not None and not ("row per token" in obeys and freqs.size(0) == t.size(0)):
            lengths = cu_seqlens.diff()
            starts = torch.repeat_interleave(cu_seqlens[:-1], lengths, output_size=t.size(0))
            freqs = freqs[torch.arange(t.size(0)) - starts]
        given = (
            t[:, None] if cu_seqlens is not None else t,
            freqs,
            config.rotary_interleaved and "interleaved" in obeys,
            mla and "mla" in obeys,
            mscale if "mscale" in obeys else 1.0,
        )
        made = rope_utils._apply_rotary_pos_emb_bshd(*given)
        return made[:, 0] if cu_seqlens is not None else made

    return apply_rotary_pos_emb


ALL = {"interleaved", "mscale", "mla", "row per token"}


def wrong_gradient(t, *args, **kwargs):
    return rotation(ALL)(2 * t, *args, **kwargs) - rotation(ALL)(t.detach(), *args, **kwargs)


def wrong_value(*args, **kwargs):
    return rotation(ALL)(*args, **kwargs) + 1.0


def loses_mscale_of_packed_rows(t, freqs, config, cu_seqlens=None, **how):
    return rotation(ALL if cu_seqlens is None else ALL - {"mscale"})(t, freqs, config, cu_seqlens, **how)


def loses_heads(*args, **kwargs):
    return rotation(ALL)(*args, **kwargs)[..., :1, :]


def asks_the_trainer(t, freqs, config, cu_seqlens=None, **how):
    return rotation(ALL)(t, freqs, config, cu_seqlens, **how) + config.of_this_trainer


def knows_no_packed_rows(obeys):
    return lambda t, freqs, config, cu_seqlens=None, **how: rotation(obeys)(t, freqs, config, **how)


def model(**fields):
    config = config_of(fused=fields.pop("fused", True))
    vars(config).update(fields)
    return SimpleNamespace(config=config)


OF_OTHERS = [
    (rotation(ALL), [], True),
    *((rotation(ALL - {ask}), [], False) for ask in sorted(ALL)),
    (wrong_gradient, [], False),
    (wrong_value, [], False),
    (loses_mscale_of_packed_rows, [], False),
    (loses_heads, [], False),
    (knows_no_packed_rows(ALL), [], "a call raised"),
    (knows_no_packed_rows(ALL - {"mscale"}), [], False),
    (asks_the_trainer, [], "AttributeError"),
    # With a model, what this model asks.
    (rotation(ALL - {"mscale", "mla", "interleaved"}), [model()], True),
    (rotation(ALL - {"interleaved"}), [model(), model(rotary_interleaved=True)], False),
    (rotation(ALL - {"mla"}), [model(multi_latent_attention=True)], False),
    (rotation(ALL - {"mscale"}), [model(multi_latent_attention=True)], False),
    (rotation(ALL - {"mscale"}), [model(yarn_rotary_scaling_factor=4.0)], False),
    (rotation(ALL - {"mscale"}), [model(yarn_rotary_scaling_factor=None)], True),
    (rotation(ALL - {"row per token"}), [model()], False),
    (rotation(), [model(fused=False)], True),
    (rotation(), [model(fused=False), model()], False),
    (asks_the_trainer, [model(of_this_trainer=0.0)], True),
    (rotation(), [SimpleNamespace()], False),
]


def test_a_function_of_others_is_tried_for_what_it_is_asked():
    with testing.layout_initialised(testing.Layout()):
        for number, (function, models, expected) in enumerate(OF_OTHERS):
            found, why = run(probe, function, TARGET, models)
            assert (found, why) == (expected, "") or (found is None and str(expected) in why), (number, found, why)
        stock = STOCK["apply_rotary_pos_emb"]
        assert run(probe, stock, TARGET, [])[0] is None, "without a fused function nobody can tell"
        with kernels():
            assert run(probe, stock, TARGET, []) == (False, "")


@pytest.mark.parametrize(
    ("function", "first", "state"),
    [
        (loses_heads, "trainer", "conflict"),
        (rotation(ALL), "shim", "applied"),
        (asks_the_trainer, "shim", "unknown"),
    ],
)
def test_what_trying_shows_is_the_state(monkeypatch, function, first, state):
    with testing.layout_initialised(testing.Layout()):
        found = state_beside(monkeypatch, ID, rope_utils, "apply_rotary_pos_emb", function, first)
    assert found.state == state, str(found)


@pytest.mark.skipif(MINOR >= (0, 19), reason="from 0.19 on the patch goes around no such function")
def test_a_function_of_others_beneath_the_patch_is_tried_with_it(monkeypatch):
    """It takes the same arguments, so the patch turns the fusion off for it; alone it has the defect."""

    def fuses(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None):
        if cu_seqlens is None or not config.apply_rope_fusion:
            return rotation(ALL)(t, freqs, config, cu_seqlens, mscale, cp_group)
        fused = rope_utils.fused_apply_rotary_pos_emb_thd
        return fused(t, cu_seqlens, freqs, interleaved=config.rotary_interleaved)

    with testing.layout_initialised(testing.Layout()), kernels():
        assert run(probe, fuses, TARGET, []) == (False, "")
        found = state_beside(monkeypatch, ID, rope_utils, "apply_rotary_pos_emb", fuses, "trainer")
    assert found.state == "applied" and "bound" in found.targets.values(), str(found)
