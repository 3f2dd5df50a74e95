"""rope-thd: functions of others in the place of upstream's are tried for a loop over sequences."""

import pytest
import torch
from foreign_functions import state_beside
from megatron.core.models.common.embeddings import rope_utils

import shim
from shim import testing
from shim._engine.models import run
from shim.patches.megatron_core.rope_thd import probe

CELLS = {"0.16.0": "all"}

ID = "rope-thd"
STOCK = {name: getattr(rope_utils, name) for name in ("_apply_rotary_pos_emb_thd", "apply_rotary_pos_emb")}

pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release has no loop")


def at_once(t, cu_seqlens, freqs, cp_group=None, **how):
    """Takes the row of each token by its place in its sequence."""
    lengths = cu_seqlens.diff()
    places = torch.arange(t.size(0)) - torch.repeat_interleave(cu_seqlens[:-1], lengths, output_size=t.size(0))
    how.pop("max_seqlen", None)
    return rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs[places], **how)[:, 0]


def one_by_one(t, cu_seqlens, freqs, cp_group=None, **how):
    how.pop("max_seqlen", None)
    parts = t.split(cu_seqlens.diff().tolist())
    return torch.cat(
        [rope_utils._apply_rotary_pos_emb_bshd(part[:, None], freqs[: len(part)], **how)[:, 0] for part in parts]
    )


def as_one_sequence(t, cu_seqlens, freqs, cp_group=None, **how):
    """Has a row for each token, and nothing to do with a table of positions."""
    how.pop("max_seqlen", None)
    return rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs[torch.arange(len(t)) % len(freqs)], **how)[:, 0]


def asks_the_trainer(t, cu_seqlens, freqs, **how):
    return t.rotated_by_this_trainer


def by_apply(rotate):
    """The same in the place of the function that leads there."""

    def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, **how):
        return rotate(t, cu_seqlens, freqs, cp_group, rotary_interleaved=config.rotary_interleaved, mscale=mscale)

    return apply_rotary_pos_emb


TRIED = [(at_once, True), (one_by_one, False), (as_one_sequence, "to other values"), (asks_the_trainer, "raised")]


@pytest.mark.parametrize("name", STOCK)
def test_a_function_of_others_is_tried_for_a_loop(name):
    with testing.layout_initialised(testing.Layout()):
        for function, expected in TRIED:
            function = by_apply(function) if name == "apply_rotary_pos_emb" else function
            found, why = run(probe, function, rope_utils.__name__ + ":" + name, [])
            assert (found, why) == (expected, "") or (found is None and expected in why), function
        assert run(probe, STOCK[name], rope_utils.__name__ + ":" + name, []) == (False, "")


@pytest.mark.parametrize(
    ("name", "function", "first", "state"),
    [
        ("_apply_rotary_pos_emb_thd", one_by_one, "trainer", "conflict"),
        ("apply_rotary_pos_emb", by_apply(at_once), "shim", "applied"),
        ("apply_rotary_pos_emb", by_apply(asks_the_trainer), "trainer", "unknown"),
    ],
)
def test_what_trying_shows_is_the_state(monkeypatch, name, function, first, state):
    """In the place of the target, and of the function that leads there."""
    with testing.layout_initialised(testing.Layout()):
        found = state_beside(monkeypatch, ID, rope_utils, name, function, first)
    assert found.state == state, str(found)
