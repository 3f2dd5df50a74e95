"""Real Liger under shim, in both orders: its cross entropy stands where chunked-logprob and label-smoothing bind.

Liger's function bears shim's, or upstream's, as __wrapped__, and never calls it. So it is in the patches' place.
"""

import functools

import pytest
import trainers

RELEASES = ("0.18.2", "0.19.2")  # Liger's norm does not fit releases up to 0.16
ORDERS = ("shim first", "liger first")
LABELS, LOGPROB = "label-smoothing", "chunked-logprob"
PLACE = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"


@functools.cache
def story(core, order, cross_entropy=True):
    arguments = (order, cross_entropy)
    return trainers.run(
        "liger_story:tell", *arguments, trainers=["liger-kernel"], core=core, te=None, TRITON_INTERPRET="1"
    )


@pytest.fixture(params=RELEASES)
def core(request):
    return request.param


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


@pytest.fixture
def told(core, order):
    return story(core, order)


def test_ligers_losses_are_computed_and_right(told):
    """By Liger's own kernels, fused and not: the states below say so."""
    assert told["shim's calls"] == 0
    assert all(error < 1e-5 for error in told["error"]), told["error"]
    assert PLACE in told["replaced"]


def test_what_liger_replaces_is_said(told):
    """Whatever __wrapped__ says; with who is there, and nothing else of shim is amiss."""
    assert told["checked"]["raised"] is None
    found = told["checked"]["states"]
    state, reason, _ = found[LABELS]
    assert state == "conflict" and "liger_kernel/megatron/monkey_patch.py" in reason
    _, reason, others = found[LOGPROB]
    said = " ".join([reason, *others])
    assert "liger_kernel/megatron/monkey_patch.py" in said and PLACE in said
    others = {state for id, (state, _, _) in found.items() if id not in (LABELS, LOGPROB)}
    assert others <= {"applied", "idle", "upstream", "not-needed", "inactive", "not-installed"}


def test_a_patch_without_any_effect_is_not_applied(told):
    """Liger replaces both losses whose memory chunked-logprob saves. If the patch does more, its report names both."""
    assert told["shim's calls"] == 0
    state, _, others = told["checked"]["states"][LOGPROB]
    lost = [text for text in others if "liger_kernel" in text and "keeps an fp32 copy of the logits" in text]
    assert state == "conflict" or (state == "applied" and len(lost) == 2)


def test_the_remedy_works(told):
    """Keep Liger's and exclude the two."""
    assert f"exclude {LABELS}" in told["remedies"][LABELS]
    states = {state for state, _, _ in told["excluded"]["states"].values() if state != "idle"}
    assert told["excluded"]["raised"] is None
    assert states <= {"applied", "upstream", "not-needed", "inactive", "not-installed", "excluded"}


def test_both_orders_have_the_same_digest(core):
    first, second = (story(core, order)["checked"]["digest"] for order in ORDERS)
    assert first == second


def test_norms_and_swiglu_alone_are_no_matter_of_shims(order):
    """Liger's default leaves the cross entropy alone: shim's is computed, and said to be applied."""
    told = story("0.18.2", order, False)
    assert told["shim's calls"] > 0 and all(error < 1e-5 for error in told["error"])
    assert {told["checked"]["states"][id][0] for id in (LABELS, LOGPROB)} == {"applied"}
    assert told["replaced"] and not told["left"]


def test_revert_leaves_nothing(told):
    """liger first: every function is the very object that Liger left. shim first: none of shim's is left."""
    assert not told["left"]
