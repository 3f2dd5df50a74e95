"""router-replay under Transformer Engine's own checkpoint, which megatron-core takes with FP8."""

import pytest
import torch
from megatron.core.extensions import transformer_engine as extensions

import shim
from shim.patches.megatron_core.router_replay.proof import OF, TOKENS, TOPK, alone, experts, replay, replay_module

CELLS = {"0.19.2+2.20.2": "all"}

ID = "router-replay"
pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch")


def chosen_in_both_passes():
    """The experts of the forward pass, and those of a recompute after another microbatch."""
    with alone():
        router, seen = replay_module().RouterReplay(), []

        def choose(scores):
            probs, indices = router.get_replay_topk(scores, TOPK, None, None, None)
            seen.append(indices)
            return probs

        first, second = experts(1)
        replay([first])
        # No random state is kept apart.
        found = extensions.te_checkpoint(choose, False, None, None, torch.rand(TOKENS, OF, requires_grad=True))
        replay([second])
        found.sum().backward()
        return [torch.equal(indices, first) for indices in seen]


def test_stock_replays_what_came_last():
    assert chosen_in_both_passes() == [True, False]


def test_a_recompute_replays_what_its_forward_pass_replayed():
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied"
        assert chosen_in_both_passes() == [True, True]


def test_a_module_is_left_as_it_is(monkeypatch):
    """Transformer Engine looks for its own modules in it."""
    given, linear = [], torch.nn.Linear(2, 2)
    with shim.patched(only=[ID], require=[ID]), alone():
        replay_module().RouterReplay()
        monkeypatch.setattr("transformer_engine.pytorch.distributed.checkpoint", lambda f, *_, **__: given.append(f))
        extensions.te_checkpoint(linear, False, None, None, torch.zeros(2))
    assert given == [linear]
