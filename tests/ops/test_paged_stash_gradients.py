"""The paged stash: gradients, bit for bit, with and without it."""

import contextlib
import threading
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from stash_cases import (  # noqa: E402
    ANY_STASH,
    BOTH,
    HIDDEN,
    ROWS,
    SEES_HOOKS,
    SOME,
    STASHES,
    VALID,
    Batch,
    Expert,
    Save,
    ample,
    assert_nothing_lives,
    assert_same,
    gradients,
    run,
)
from torch.autograd.graph import save_on_cpu  # noqa: E402
from torch.nn.functional import silu  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from shim.ops.paged_stash import PagedStash  # noqa: E402


@BOTH
@ANY_STASH
@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_have_the_same_bits(dtype, valid, stash, fused):
    expert, batch, stash = Expert(dtype, fused), Batch(valid, dtype), stash()
    assert_same(gradients(stash, expert, batch), gradients(None, expert, batch))
    found = stash.statistics()
    assert found.stashed + found.spilled + found.kept >= 3 and found.lost == 0
    assert_nothing_lives(stash)
    stash.check()


def test_rows_that_are_not_valid_come_back_as_zeros_whatever_was_in_them():
    expert, batch, stash = Expert(), Batch(10), ample()
    garbage = Batch(10)
    garbage.x[10:] = float("nan")
    batch.x[10:] = 0
    found, expected = gradients(stash, expert, garbage), gradients(None, expert, batch)
    assert_same(found[2:], expected[2:])


def test_experts_in_three_dimensions_are_known_by_block_of():
    experts, capacity, valid = 4, ROWS // 4, torch.tensor([3, 0, 9, 6])
    batch, weight = Batch(valid), torch.nn.Parameter(torch.randn(4, HIDDEN, HIDDEN))

    def compute(x):
        x = x.view(experts, capacity, HIDDEN)
        return silu(torch.bmm(x, weight)).flatten(0, 1)

    found = []
    for stash in (None, ample()):
        x, _ = batch.leaves()
        if stash is None:
            output = compute(x)
        else:
            with stash.group(
                ROWS, valid, weights=[weight], block_of=lambda t: 1 if t.shape[:2] == (experts, capacity) else None
            ) as group:
                output = compute(x)
            group.commit(output)
            assert stash.statistics().stashed == 2
        found.append(torch.autograd.grad(batch.loss(output), (x, weight)))
    assert_same(*found)


def test_a_row_for_a_block_of_rows():
    scales, valid = torch.randn(ROWS // 4, 3), torch.tensor(9)
    stash, leaf = ample(), torch.ones((), requires_grad=True)
    with stash.group(ROWS, valid, block_of=lambda t: 4 if t.shape == scales.shape else None) as group:
        output = Save.apply(leaf, scales)
    group.commit(output)
    found, _ = output.grad_fn.saved_tensors
    assert torch.equal(found[:3], scales[:3]) and not found[3:].any()


@pytest.mark.parametrize("block", [5, 48])
def test_blocks_that_do_not_divide_the_rows_stay(block):
    stash, leaf, scales = ample(), torch.ones((), requires_grad=True), torch.randn(5, 4)
    with stash.group(ROWS, 9, block_of=lambda t: block) as group:
        output = Save.apply(leaf, scales)
    group.commit(output)
    assert stash.live == 0 and torch.equal(output.grad_fn.saved_tensors[0], scales)


ORDERS = {
    "all forward, then all backward": "f0 f1 f2 f3 b0 b1 b2 b3",
    "reverse": "f0 f1 f2 f3 b3 b2 b1 b0",
    "1F1B": "f0 f1 b0 f2 b1 f3 b2 b3",
    "one at a time": "f0 b0 f1 b1 f2 b2 f3 b3",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("stash", [ample, STASHES["keep, too small"], STASHES["spill"]], ids=["ample", "keep", "spill"])
def test_orders_of_a_pipeline(order, stash):
    found = []
    for stash in (None, stash()):
        expert, graphs, results = Expert(), {}, []
        for what, number in order.split():
            batch = Batch(torch.tensor([5 * int(number)]), seed=int(number))
            if what == "f":
                leaves = batch.leaves()
                graphs[number] = leaves, batch.loss(run(stash, expert, *leaves, valid=batch.valid))
            else:
                leaves, loss = graphs.pop(number)
                loss.backward()
                results += [leaf.grad for leaf in leaves]
                del loss
        found.append(results + [p.grad for p in expert.parameters()])
    assert_same(*found)
    assert_nothing_lives(stash)


def test_two_chunks_interleaved():
    order = "f00 f10 f01 f11 b10 f02 b00 b11 f12 b01 b12 b02"  # of chunk, microbatch
    found = []
    for stash in (None, PagedStash(20, page_size=4)):
        chunks, graphs = [Expert(seed=0), Expert(seed=1)], {}
        for what, chunk, number in order.split():
            chunk, number = int(chunk), int(number)
            batch = Batch(torch.arange(ROWS) % 4 != number, seed=number)
            if what == "f":
                x, probs = batch.leaves()
                if chunk == 1:
                    x = graphs[0, number][1].detach().requires_grad_()
                graphs[chunk, number] = x, run(stash, chunks[chunk], x, probs, valid=batch.valid)
            elif chunk == 1:
                batch.loss(graphs[1, number][1]).backward()
            else:
                output = graphs.pop((0, number))[1]
                output.backward(graphs.pop((1, number))[0].grad)
        found.append([p.grad for chunk in chunks for p in chunk.parameters()])
    assert_same(*found)
    assert_nothing_lives(stash)


@SOME
@BOTH
def test_two_backwards_through_a_retained_graph(fused, valid):
    expert, batch, found = Expert(fused=fused), Batch(valid), []
    for stash in (None, ample()):
        leaves = batch.leaves()
        loss = batch.loss(run(stash, expert, *leaves, valid=valid))
        loss.backward(retain_graph=True)
        assert stash is None or stash.live
        loss.backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad for p in expert.parameters()])
        expert.zero_grad()
    assert_same(*found)
    assert_nothing_lives(stash)


@SOME
@ANY_STASH
def test_double_backward(stash, valid):
    expert, batch, found = Expert(dtype=torch.float64), Batch(valid, torch.float64), []
    for stash in (None, stash()):
        leaves = batch.leaves()
        inputs = [*leaves, *expert.parameters()]
        loss = batch.loss(run(stash, expert, *leaves, valid=valid))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        found.append([*first, *torch.autograd.grad(penalty, inputs)])
        del first, penalty, loss
    assert_same(*found)
    assert_nothing_lives(stash)


def around(hook):
    def call(stash, expert, *leaves, valid):
        return hook(lambda *inputs: run(stash, expert, *inputs, valid=valid), *leaves)

    return call


def inside(hook):
    def call(stash, expert, *leaves, valid):
        def forward(x, probs):
            return hook(expert, x * 2, probs).sin()

        return run(stash, forward, *leaves, valid=valid)

    return call


def saving_on_cpu(function, *args):
    with save_on_cpu():
        return function(*args)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


@SOME
@pytest.mark.parametrize("hook", [saving_on_cpu, reentrant, not_reentrant])
@pytest.mark.parametrize("place", [around, inside])
def test_with_hooks_of_somebody_else(place, hook, valid):
    # torch.autograd.grad is nothing for a reentrant checkpoint
    expert, batch, found = Expert(), Batch(valid), []
    for stash in (None, ample()):
        leaves = batch.leaves()
        batch.loss(place(hook)(stash, expert, *leaves, valid=valid)).backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad for p in expert.parameters()])
        expert.zero_grad()
    assert_same(*found)
    assert_nothing_lives(stash)
    stashed = stash.statistics()
    if place is inside:
        assert stashed.stashed >= 1
    else:
        assert stashed.stashed == 0 and (stashed.skipped or hook is reentrant)


@pytest.mark.skipif(not SEES_HOOKS, reason="this torch does not tell which saved tensors have hooks")
@pytest.mark.parametrize("hook", [saving_on_cpu, not_reentrant])
def test_what_has_hooks_is_not_looked_at_in_the_forward(hook):
    forwards, stash = [], ample()

    def body(x):
        forwards.append(1)
        return (x.sin() * x.exp()).sigmoid()

    with stash.group(ROWS) as group:
        output = hook(body, Batch().leaves()[0])
    before = stash.statistics()
    with mock.patch.object(torch.Tensor, "to", side_effect=AssertionError("fetched")):
        group.commit(output)
    assert len(forwards) == 1 and stash.statistics().pools == before.pools


@pytest.mark.skipif(not SEES_HOOKS, reason="this torch does not tell which saved tensors have hooks")
def test_of_nested_groups_the_inner_one_stashes():
    stash, (x, _) = PagedStash(2 * ROWS // 4, page_size=4, overflow="raise"), Batch(10).leaves()
    with stash.group(ROWS, 10) as outer:
        with stash.group(ROWS, 10) as inner:
            output = x.sin().exp()
        inner.commit(output)
        output = output.sin()
    outer.commit(output)
    assert stash.statistics().stashed == 3 and stash.live == 3
    stash.check()
    output[:10].sum().backward()
    expected = x.detach().requires_grad_()
    expected.sin().exp().sin()[:10].sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert_nothing_lives(stash)


def test_frozen_weights_with_an_adapter():
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = Expert().requires_grad_(False)
            self.a, self.b = torch.nn.Linear(HIDDEN, 4, bias=False), torch.nn.Linear(4, HIDDEN, bias=False)

        def forward(self, x, probs):
            return self.expert(x + self.b(self.a(x)), probs)

    module, batch, stash = Adapted(), Batch(10), ample()
    assert_same(gradients(stash, module, batch), gradients(None, module, batch))
    assert stash.statistics().stashed >= 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_stashed(mode):
    expert, batch, stash = Expert(), Batch(), ample()
    with mode():
        found = stash.run(expert, batch.x, batch.probs, rows=ROWS)
        stash.check()
    assert torch.equal(found, expert(batch.x, batch.probs)) and not stash.pools
    assert_same(gradients(stash, expert, batch), gradients(None, expert, batch))


def test_a_pool_that_was_resized_in_inference_mode():
    stash, expert, batch = ample(), Expert(), Batch()
    gradients(stash, expert, batch)
    with torch.inference_mode():
        for pool in stash.pools.values():
            pool.allocate_pages(500, 0)
    assert_same(gradients(stash, expert, batch), gradients(None, expert, batch))


def test_nests_of_outputs_and_one_that_is_not_connected():
    stash, (x, _) = ample(), Batch(10).leaves()
    with stash.group(ROWS, 10) as group:
        output = {"a": (x.sin(), None, 3), "b": [x.exp(), {"c": torch.ones(3)}]}
    group.commit(output)
    assert stash.live == 2
    (output["a"][0] * output["b"][0])[:10].sum().backward()
    plain = x.detach().requires_grad_()
    (plain.sin() * plain.exp())[:10].sum().backward()
    assert torch.equal(x.grad, plain.grad)
    del output
    assert_nothing_lives(stash)


def test_what_leads_to_no_output_is_left_alone_and_so_is_what_was_before():
    stash, (x, _) = ample(), Batch(10).leaves()
    before = x.exp()
    with stash.group(ROWS, 10) as group:
        other, output = before.sin(), before.cos()
    group.commit(output)
    assert stash.live == 1
    (other.sum() + output[:10].sum() + before.sum()).backward()
    plain = x.detach().requires_grad_()
    exp = plain.exp()
    (exp.sin().sum() + exp.cos()[:10].sum() + exp.sum()).backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_commit_is_for_once_and_not_after_an_exception():
    stash, (x, _) = ample(), Batch().leaves()
    with stash.group(ROWS) as group:
        output = x.exp()
    group.commit(output)
    group.commit(output)
    assert stash.live == 1
    with contextlib.suppress(KeyError), group:
        output = x.exp()
        raise KeyError
    group.commit(output)
    assert stash.live == 0


@pytest.mark.parametrize("function", [torch.exp, lambda x: Save.apply(x.sum(), x * 1)], ids=["C++", "Python"])
def test_a_commit_after_the_backward(function):
    stash, (x, _) = ample(), Batch().leaves()
    with stash.group(ROWS) as group:
        output = function(x)
        output.sum().backward()
    group.commit(output)
    assert_nothing_lives(stash)


def test_threads_with_a_model_each_share_a_stash():
    stash, wrong = PagedStash(20, page_size=4), []

    def work(seed):
        expert = Expert(seed=seed)
        for number in range(15):
            batch = Batch(torch.tensor([(7 * number + seed) % ROWS]), seed=number)
            found, expected = gradients(stash, expert, batch), gradients(None, expert, batch)
            wrong.extend(1 for a, b in zip(found, expected) if not torch.equal(a, b))
        wrong.append(0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]
    assert_nothing_lives(stash)
