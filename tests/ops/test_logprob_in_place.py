"""Log-probabilities with the gradient in place of the logits: right, or an error."""

import pytest

torch = pytest.importorskip("torch")

from logprob_cases import HALF_ULP, Alias, sample, strided  # noqa: E402
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402

from shim._torch_names import find  # noqa: E402
from shim.ops import logprob  # noqa: E402
from shim.ops.logprob import token_logprobs  # noqa: E402


def in_place(x, target, **options):
    return token_logprobs(x, target, inplace_backward=True, entropy=True, **options)


def both(found):
    return found.logprob.sum() + 2 * found.entropy.sum()


@pytest.mark.parametrize("dtype", list(HALF_ULP))
def test_in_place_the_gradient_lies_in_the_logits_and_has_the_same_bits(dtype):
    logits, target, _ = sample(5, 3, 11, dtype=dtype)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf, target, entropy=True)), leaf)
    computed = leaf * 1
    (mine,) = torch.autograd.grad(both(in_place(computed, target)), computed)
    assert torch.equal(mine, plain) and mine.data_ptr() == computed.data_ptr()
    assert mine.dtype == dtype and not mine.requires_grad


USES = {
    "a product that saved them": lambda x, target: x.square().sum(),
    "a function of them": lambda x, target: x.sin().sum(),
    "the same function": lambda x, target: both(token_logprobs(x, target, entropy=True)),
    "the same in place": lambda x, target: both(in_place(x, target)),
    "a view": lambda x, target: x.view(-1).square().sum(),
    "what saves nothing": lambda x, target: x.sum(),
}


# Where hooks keep saved tensors, autograd does not look whether they were modified.
@pytest.mark.parametrize("use, hooks", [(use, hooks) for use in USES for hooks in (False, True)])
@pytest.mark.parametrize("order", ["before", "after", "separately before", "separately after"])
def test_in_place_beside_another_use_of_the_logits(use, order, hooks):
    """Every order of the forwards and of the backwards gives the gradient that it gives out of place, or an error."""
    logits, target, _ = sample(5, 11)

    def gradient(function, use):
        leaf = logits.clone().requires_grad_()
        computed = leaf * 1
        with saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else torch.enable_grad():
            losses = [lambda: both(function(computed, target)), lambda: USES[use](computed, target)]
            losses = [make() for make in (losses[::-1] if "before" in order else losses)]
        if "separately" in order:
            losses[0].backward(retain_graph=True)
            losses[1].backward(retain_graph=True)
        else:
            sum(losses).backward()
        return leaf.grad

    out_of_place = "the same function" if use == "the same in place" else use
    expected = gradient(lambda x, t: token_logprobs(x, t, entropy=True), out_of_place)
    try:
        mine = gradient(in_place, use)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        outcome = "an error"
    else:
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
        outcome = "right"
    # Autograd runs the latest forward first: only who is behind in that order needs the logits after they are gone.
    first = {"before": True, "after": False, "separately before": False, "separately after": True}[order]
    loses = first or use == "the same in place"
    # Where a view is held, or hooks that keep what they are given, nothing is written over the logits.
    written = use not in ("what saves nothing", "a view") and not hooks
    assert outcome == ("an error" if loses and written else "right")


def test_in_place_there_is_no_second_backward():
    logits, target, _ = sample(5, 11)
    computed = logits.requires_grad_() * 1
    loss = both(in_place(computed, target))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_in_place_there_is_no_double_backward():
    logits, target, _ = sample(3, 5)
    computed = logits.requires_grad_() * 1
    (gradient,) = torch.autograd.grad(both(in_place(computed, target)), computed, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()


# How logits have memory that somebody else has too, of a leaf or of a tensor that was computed.
SHARED = {
    "an alias": Alias.apply,
    "a view of an alias": lambda x: Alias.apply(x)[:2],
    "an alias of a view": lambda x: Alias.apply(x.view(-1)).view(3, 5),
    "an alias of an alias": lambda x: Alias.apply(Alias.apply(x)),
}


@pytest.mark.parametrize("of_leaf", [True, False])
@pytest.mark.parametrize("how", SHARED)
def test_in_place_of_memory_that_others_have_is_not_in_place(how, of_leaf):
    values, target, _ = sample(3, 5)
    leaf = values.clone().requires_grad_()
    held = leaf if of_leaf else leaf * 1
    logits = SHARED[how](held)
    target = target[: len(logits)]
    (plain,) = torch.autograd.grad(both(token_logprobs(logits, target, entropy=True)), leaf, retain_graph=True)
    both(in_place(logits, target)).backward()
    assert torch.equal(held.detach(), values) and torch.equal(leaf.grad, plain)


def test_in_place_behind_an_operation_that_saved_its_result():
    logits, target, _ = sample(3, 5)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf.tanh(), target, entropy=True)), leaf)
    both(in_place(leaf.tanh(), target)).backward()
    assert torch.equal(leaf.grad, plain)


def test_in_place_of_parts_of_the_same_logits():
    """The first backward writes nothing, since the other part is still to come."""
    logits, target, _ = sample(6, 5)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf, target, entropy=True)), leaf)
    parts = zip((leaf * 1).split(3), target.split(3))
    sum(both(in_place(part, aim)) for part, aim in parts).backward()
    torch.testing.assert_close(leaf.grad, plain, rtol=1e-6, atol=1e-7)


def test_in_place_of_logits_that_were_modified_since():
    logits, target, _ = sample(3, 5)
    for hooks in (False, True):
        computed = logits.clone().requires_grad_() * 1
        with saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else torch.enable_grad():
            loss = both(token_logprobs(computed, target, entropy=True))
        with torch.no_grad():
            computed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1, 5), lambda x: x[1:]])
def test_in_place_of_a_leaf_is_an_error(view):
    leaf = torch.zeros(3, 5, requires_grad=True)
    logits = view(leaf)
    with pytest.raises(ValueError, match="leaf"):
        in_place(logits, torch.zeros(len(logits), dtype=torch.int64))
    # Without a gradient nothing would be written.
    in_place(logits.detach(), torch.zeros(len(logits), dtype=torch.int64))


@pytest.mark.parametrize("how", ["expanded", "every other", "sliced", "batch first", "transposed"])
def test_in_place_at_any_strides(how):
    logits, target, _ = sample(4, 3, 6)
    if how == "expanded":
        logits = logits[:1].expand_as(logits).contiguous()

    def gradient(function):
        leaf = logits.clone().requires_grad_()
        both(function(strided(leaf * 1, how), target)).backward()
        return leaf.grad

    mine = gradient(in_place)
    torch.testing.assert_close(mine, gradient(lambda x, t: token_logprobs(x, t, entropy=True)), rtol=1e-6, atol=1e-7)
    assert mine.count_nonzero()


def test_in_place_of_logits_that_were_saved_elsewhere():
    logits, target, _ = sample(4, 6)
    leaf = logits.requires_grad_()
    (plain,) = torch.autograd.grad(both(token_logprobs(leaf, target, entropy=True)), leaf)
    computed = leaf * 1
    with save_on_cpu():
        loss = both(in_place(computed, target))
    loss.backward()
    assert torch.equal(leaf.grad, plain)


def unread(x, target, **options):
    return token_logprobs(x, target, inplace_backward="unread", entropy=True, **options)


def is_written_over(make_logits, *, hold=lambda logits: None, after=lambda loss: loss.backward()):
    """Whether backward has written over the logits, of which only `hold` and its result know."""
    values, target, _ = sample(5, 11)
    leaf = values.clone().requires_grad_()
    gradients = []

    def loss_of():
        logits = make_logits(leaf)
        logits.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
        return both(unread(logits, target)), logits.data_ptr(), hold(logits)

    loss, address, held = loss_of()
    after(loss)
    (plain,) = torch.autograd.grad(both(token_logprobs(make_logits(leaf), target, entropy=True)), leaf)
    assert torch.equal(leaf.grad, plain) and held is not loss
    return gradients == [address]


@pytest.mark.parametrize(
    "make_logits", [lambda x: x * 1, lambda x: (x * 1).matmul(torch.eye(11)), lambda x: Alias.apply(x * 1)]
)
def test_logits_that_nobody_can_read_are_written_over(make_logits):
    assert is_written_over(make_logits)


def squared(logits):
    return logits.square().sum()


HELD = {
    "a variable": lambda logits: logits,
    "a list": lambda logits: [logits],
    "a closure": lambda logits: lambda: logits,
    "a node": squared,
    "its result without a gradient": torch.Tensor.detach,
    "a view": lambda logits: logits[:2],
    "an array": lambda logits: logits.detach().numpy(),
    "a storage": torch.Tensor.untyped_storage,
}


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_logits_that_somebody_can_read_stay(hold):
    assert not is_written_over(lambda x: x * 1, hold=hold)


def test_logits_of_a_graph_that_is_retained_stay():
    """A second backward is as right as the first."""

    assert not is_written_over(lambda x: x * 1, after=lambda loss: loss.backward(retain_graph=True))
    logits, target, _ = sample(5, 11)
    leaf = logits.requires_grad_()
    loss = both(unread(leaf * 1, target))
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=again)[0] for again in (True, False))
    assert torch.equal(first, second)


@pytest.mark.parametrize("make_logits", [lambda x: x.tanh(), lambda x: (x * 1).view(5, 11), lambda x: x[:]])
def test_logits_that_a_view_or_their_own_operation_has_stay(make_logits):
    assert not is_written_over(make_logits)


def test_a_leaf_stays_and_raises_nothing():
    values, target, _ = sample(5, 11)
    leaf = values.clone().requires_grad_()
    both(unread(leaf, target)).backward()
    assert torch.equal(leaf.detach(), values)


def test_hooks_that_keep_the_logits():
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not is_written_over(lambda x: x * 1)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("use", USES)
def test_another_use_of_the_logits_is_right_in_any_order(use, order):
    logits, target, _ = sample(5, 11)

    def gradient(function):
        leaf = logits.clone().requires_grad_()

        def losses():
            computed = leaf * 1
            made = [lambda: both(function(computed, target)), lambda: USES[use](computed, target)]
            return [make() for make in (made[::-1] if order == "before" else made)]

        sum(losses()).backward()
        return leaf.grad

    if use == "the same in place":  # it writes over the logits, and says so
        pytest.skip("its own test is above")
    expected = gradient(lambda x, t: token_logprobs(x, t, entropy=True))
    torch.testing.assert_close(gradient(unread), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["torch:_C._storage_Use_Count", "torch:_C._autograd._get_current_graph_task_keep_graph"]
)
def test_a_torch_that_cannot_tell_gives_a_separate_gradient(monkeypatch, name):
    monkeypatch.setattr(logprob, "find", lambda path: None if path == name else find(path))
    assert not is_written_over(lambda x: x * 1)


def test_an_unknown_way_is_an_error():
    with pytest.raises(ValueError, match="'unread'"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), inplace_backward="maybe")
