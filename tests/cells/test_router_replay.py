"""router-replay: a recompute does what its forward pass did, whatever the trainer has set since."""

import contextlib
import copy
import gc
from unittest import mock

import pytest
import torch
from needed import needed
from packaging.version import Version

import shim
from shim import testing
from shim.patches.megatron_core.router_replay import RouterReplayError
from shim.patches.megatron_core.router_replay import proof as proofs
from shim.patches.megatron_core.router_replay.proof import FULL, LAYERS, MODEL, OF, TOKENS, TOPK, experts, losses

CELLS = {"0.17.1": "all"}

ID = "router-replay"
NEEDED = shim.plan()[ID].wanted
pytestmark = needed(ID)
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


@pytest.fixture(autouse=True)
def one_rank(request):
    if "ranks2" in request.fixturenames:  # they are forked from a process without a layout
        yield
        return
    with testing.layout_initialised(testing.Layout()), proofs.alone() if NEEDED else contextlib.nullcontext():
        yield


@pytest.fixture
def patched():
    with shim.patched(only=[ID], require=[ID]) as report:
        yield report


def replays():
    return proofs.replay_module().RouterReplay


def act(action):
    """Let all routers take this action: one of RouterReplayAction by name, or None."""
    if action is None:
        replays().clear_global_router_replay_action()
    else:
        replays().set_global_router_replay_action(proofs.replay_module().RouterReplayAction[action])


def by_the_list():
    act("REPLAY_BACKWARD")


def cleared():
    replays().clear_global_indices()
    act(None)


def left():
    pass


def recorded_since():
    act("RECORD")


def first_stage(between, forward="REPLAY_FORWARD", **options):
    """Gradients of two microbatches that both run forward before the first runs backward."""
    replays().clear_global_router_replay_instances()
    model = testing.build_gpt(**MODEL, **options)
    found = []
    for microbatch in range(2):
        if forward == "REPLAY_FORWARD":
            proofs.replay(experts(microbatch))
        else:
            act(forward)
        found.append(losses(model).mean() * (microbatch + 1))
    between()
    for loss in found:
        loss.backward()
    return proofs.learnt(model), model


@pytest.mark.parametrize("between", [by_the_list, cleared, left, recorded_since])
@pytest.mark.parametrize("recompute", [FULL, SELECTIVE | ALLTOALL], ids=["full", "selective"])
def test_a_recompute_does_what_its_forward_pass_did(patched, between, recompute):
    truth, _ = first_stage(left, **{key: value for key, value in recompute.items() if key in ALLTOALL})
    found, model = first_stage(between, **recompute)
    assert torch.equal(found, truth)
    # What was recomputed has been taken out of the list, once.
    lists = [layer.mlp.router.router_replay.replay_backward_list for layer in model.decoder.layers]
    assert lists == [[]] * LAYERS


@pytest.mark.parametrize("forward", [None, "RECORD"])
def test_a_choice_of_its_own_is_made_again(patched, forward):
    """Also where the next forward pass replays before the recompute."""

    def replay_other():
        proofs.replay(experts(5))

    truth, _ = first_stage(left, forward)
    found, _ = first_stage(replay_other, forward, **FULL)
    assert torch.equal(found, truth)


def test_what_stock_does_right_stays():
    """The list alone, with as many recomputes as forward passes; and a model that does not replay."""
    stock = first_stage(by_the_list, **FULL)[0], first_stage(left, None, **FULL)[0]
    with shim.patched(only=[ID], require=[ID]):
        found = first_stage(by_the_list, **FULL)[0], first_stage(left, None, **FULL)[0]
    assert all(map(torch.equal, found, stock))


def test_checkpoints_may_nest_and_run_backward_twice(patched):
    """The inner checkpoint runs forward for the second time inside the outer recompute."""
    from megatron.core.tensor_parallel import checkpoint

    replay, seen = replays()(), []

    def choose(scores):
        probs, indices = replay.get_replay_topk(scores, TOPK, None, None, lambda scores, k, **_: scores.topk(k, dim=1))
        seen.append(indices)
        return probs.sum(1)

    def inner(scores):
        return checkpoint(choose, False, scores)

    scores = torch.rand(TOKENS, OF, requires_grad=True)
    first, second = experts(1)
    proofs.replay([first])
    found = checkpoint(inner, False, scores).sum()
    proofs.replay([second])
    found.backward(retain_graph=True)
    cleared()
    found.backward()
    assert len(seen) == 5
    assert all(torch.equal(indices, first) for indices in seen)


def test_an_error_in_a_recompute_leaves_nothing_open(patched):
    from megatron.core.tensor_parallel import checkpoint

    replay, calls = replays()(), []

    def choose(scores):
        calls.append(scores)
        if len(calls) == 2:
            raise RuntimeError("on purpose")
        return replay.get_replay_topk(scores, TOPK, None, None, None)[0]

    proofs.replay(experts(1)[:1])
    with pytest.raises(RuntimeError, match="on purpose"):
        checkpoint(choose, False, torch.rand(TOKENS, OF, requires_grad=True)).sum().backward()
    proofs.replay(experts(2)[:1])
    assert torch.equal(choose_again(replay), experts(2)[0])


def choose_again(replay):
    return replay.get_replay_topk(torch.rand(TOKENS, OF), TOPK, None, None, None)[1]


@pytest.mark.parametrize("cut", [(slice(0, 4), slice(None)), (slice(None), slice(0, 1))], ids=["tokens", "topk"])
def test_experts_of_a_wrong_shape_raise(cut):
    """Stock leaves the other tokens without experts."""
    model = testing.build_gpt(**MODEL)
    proofs.replay([each[cut] for each in experts(1)])
    assert proofs.misrouted(model, experts(1)) > 0
    with shim.patched(only=[ID], require=[ID]), pytest.raises(RouterReplayError, match=r"\[router-replay\].*6 tokens"):
        losses(model)


def test_routers_go_with_their_model():
    with shim.patched(only=[ID], require=[ID]):
        list_of_stock, model = replays().global_router_replay_instances, testing.build_gpt(**MODEL)
        assert shim.status()[ID].holds
        other = testing.build_gpt(**MODEL)
        assert len(list_of_stock) == 2 * LAYERS
        del model
        gc.collect()
        mine = [layer.mlp.router.router_replay for layer in other.decoder.layers]
        assert list_of_stock is replays().global_router_replay_instances
        assert list(map(id, list_of_stock)) == list(map(id, mine))
    del other
    gc.collect()
    assert len(list_of_stock) == LAYERS  # as on stock, once the patch has gone


def test_a_fused_router_records(patched, monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    used = []

    def fused(logits, topk, **options):
        used.append(topk)
        return moe_utils.topk_routing_with_score_function(logits, topk)

    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", fused, raising=False)
    replay, logits = replays()(), torch.rand(TOKENS, OF)
    act("RECORD")
    moe_utils.topk_routing_with_score_function(logits, TOPK, fused=True, router_replay=replay)
    assert replays().get_recorded_data()[0].shape == (TOKENS, TOPK)
    assert not used
    act(None)
    moe_utils.topk_routing_with_score_function(logits, TOPK, fused=True, router_replay=replay)
    assert used == [TOPK]


def routed(route, indices, logits, **options):
    """What a router gives to replayed experts, [tokens, experts], and the gradient of its logits."""
    logits = logits.clone().requires_grad_()
    probs = route(logits, indices, **options)
    (probs * torch.arange(1.0, 1 + probs.numel()).view_as(probs)).sum().backward()
    return probs.detach(), logits.grad


def by_upstream(logits, indices, **options):
    from megatron.core.transformer.moe import moe_utils

    proofs.replay([indices])
    replay = replays().global_router_replay_instances[0]
    return moe_utils.topk_routing_with_score_function(logits, indices.shape[1], router_replay=replay, **options)[0]


def summed(logits, indices, score_function="softmax", use_pre_softmax=False):
    """The sum over the names of a row: what a dense result holds, at its expert."""
    if score_function == "sigmoid":
        probs = logits.sigmoid().gather(1, indices)
        probs = probs / probs.sum(1, keepdim=True)
    elif use_pre_softmax:
        probs = logits.softmax(1).gather(1, indices)
    else:
        probs = logits.gather(1, indices).softmax(1)
    return torch.zeros_like(logits).scatter_add(1, indices, probs)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("options", [{}, {"use_pre_softmax": True}, {"score_function": "sigmoid"}], ids=str)
def test_an_expert_gets_the_sum_over_its_names(options, deterministic):
    """Stock gives it the value of one name, with the gradient of the sum. Without repeated names it is right."""
    replays()()
    logits, indices = torch.randn(TOKENS, OF, generator=torch.Generator().manual_seed(5)), proofs.named_twice()
    truth = routed(summed, indices, logits, **options)
    different = experts(1)[0]
    torch.use_deterministic_algorithms(deterministic)
    try:
        stock = routed(by_upstream, indices, logits, **options), routed(by_upstream, different, logits, **options)
        with shim.patched(only=[ID], require=[ID]):
            found = routed(by_upstream, indices, logits, **options), routed(by_upstream, different, logits, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.allclose(stock[0][0], truth[0])
    assert torch.equal(stock[0][1], found[0][1])
    torch.testing.assert_close(found[0], truth, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, found[1], stock[1]))


def test_only_a_replay_is_counted(patched):
    """Other passes of the dispatcher wait where stock waits, also behind a replay."""
    model = testing.build_gpt(**MODEL, **ALLTOALL)
    dispatcher = model.decoder.layers[0].mlp.token_dispatcher
    seen = []
    for action in (None, "RECORD", "REPLAY_FORWARD", "RECORD", None):
        if action == "REPLAY_FORWARD":
            proofs.replay([torch.zeros(TOKENS, TOPK, dtype=torch.int64)] * LAYERS)
        else:
            act(action)
        losses(model)
        seen.append((int(dispatcher.num_out_tokens), dispatcher.cuda_sync_point))
    # Two local experts or more are sorted after the exchange, for which the host needs their sizes.
    stock = (TOKENS * TOPK, "before_permutation_2")
    assert seen == [stock, stock, (TOKENS, "before_permutation_1"), stock, stock]


def test_a_recompute_counts_its_own_map(patched):
    found = []
    for options in ({}, FULL):
        replays().clear_global_router_replay_instances()
        model = testing.build_gpt(**MODEL, **ALLTOALL, **options)
        proofs.replay([each.clamp(max=1) for each in experts(1)])
        loss = losses(model).mean()
        proofs.replay(experts(2))
        loss.backward()
        found.append(proofs.learnt(model))
    assert torch.equal(*found)


def on_the_host(tensor, as_numpy=False, record_stream=False):
    """What becomes of the sizes of messages on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def outputs(layout, ranks=None):
    """Of a layer of experts, for the tokens of these ranks or of this one. Those of the second name fewer experts."""
    from megatron.core.transformer.moe import token_dispatcher

    moved = mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_the_host)
    with moved, testing.megatron_on_cpu(), testing.layout_initialised(layout), proofs.alone():
        model, found = testing.build_gpt(**MODEL | {"num_layers": 1, "moe_router_topk": 3}, **ALLTOALL), []
        for rank in ranks or [torch.distributed.get_rank()]:
            hidden = torch.randn(TOKENS, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(rank))
            proofs.replay([proofs.named_twice().roll(2 * rank, 0).clamp(max=3 - rank)])
            with shim.patched(only=[ID], require=[ID]):
                found.append(model.decoder.layers[0].mlp(hidden)[0].detach())
        return found


def test_two_ranks_exchange_what_the_map_says(ranks2):
    one_each = ranks2.run(outputs, testing.Layout(ep=2))
    torch.testing.assert_close([found for (found,) in one_each], outputs(testing.Layout(), range(2)))


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.9"), reason="torch 2.6 traces no assignment to an attribute of a tensor"
)
def test_it_compiles(patched):
    from megatron.core.transformer.moe import moe_utils

    replay = replays()()
    proofs.replay(experts(1)[:1])

    def route(logits):
        return moe_utils.topk_routing_with_score_function(logits, TOPK, router_replay=replay)

    logits = torch.rand(TOKENS, OF)
    compiled = torch.compile(route, fullgraph=True, backend="eager")(logits)
    assert all(map(torch.equal, compiled, route(logits)))


def test_check_names_what_never_replays(patched):
    model = testing.build_gpt(**MODEL)
    assert shim.check(model)[ID].state == "applied"
    router = model.decoder.layers[0].mlp.router
    listed, router.router_replay = router.router_replay, copy.copy(router.router_replay)
    with pytest.raises(shim.NotMetError, match="copied model"):
        shim.check(model)
    router.router_replay = listed
    for layer in model.decoder.layers:
        layer.mlp.router.routing_type = "sinkhorn"
    with pytest.raises(shim.NotMetError, match="sinkhorn"):
        shim.check(model)
