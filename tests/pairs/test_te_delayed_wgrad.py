"""te-delayed-wgrad: every kind of module adds what it delays, its hooks read the sums, and nothing is added twice."""

from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from needed import needed

import shim
from shim.patches.transformer_engine.te_delayed_wgrad.proof import delay, modules_on

CELLS = {"0.13.1+2.5.0": "all"}

ID = "te-delayed-wgrad"
pytestmark = needed(ID)
HOW = {"device": "cpu", "params_dtype": torch.float32}
INPUTS, OUTPUTS, EXPERTS = 3, 2, 2


@pytest.fixture
def patched():
    with modules_on("cpu"), shim.patched(only=[ID], require=[ID]):
        yield


def delayed(kind, *sizes, **options):
    return kind(*sizes, bias=True, delay_wgrad_compute=True, **HOW, **options)


def linear():
    return delayed(te.Linear, INPUTS, OUTPUTS)


def normed_linear():
    return delayed(te.LayerNormLinear, INPUTS, OUTPUTS)


def grouped():
    return delayed(te.GroupedLinear, EXPERTS, INPUTS, OUTPUTS)


def mlp():
    return delayed(te.LayerNormMLP, INPUTS, OUTPUTS)


KINDS = (linear, normed_linear, grouped, mlp)


def put(module, value, of_biases=lambda p, value: torch.full_like(p, value)):
    """As backward does: gradients of `value` throughout. Returns the gradients of weights."""
    store, made = module.wgrad_store, {}
    for name, p in module.named_parameters(recurse=False):
        made[name] = of_biases(p, value) if "bias" in name else torch.full_like(p, value)
    if isinstance(module, te.GroupedLinear):
        weights, biases = ([made[f"{kind}{index}"] for index in range(EXPERTS)] for kind in ("weight", "bias"))
        store.put([None, None, weights], lambda *_: (None, biases, None))
    elif isinstance(module, te.LayerNormMLP):
        for layer in ("fc2", "fc1"):
            found = made[f"{layer}_weight"], made[f"{layer}_bias"], None, None
            store.put([None, None], lambda *_, found=found: found)
    else:
        delay(module, value)
        (tensors, function) = store.context.get()
        rest = function(*tensors)[2:]
        store.put(tensors, lambda *_: (made["weight"], made["bias"], *rest))
    return {name: value for name, value in made.items() if "weight" in name}


def gradients(module):
    """Of what a module delays."""
    return {name: p.grad for name, p in module.named_parameters(recurse=False) if "layer_norm" not in name}


def are(module, value, kind=""):
    return all(bool((p == value).all()) for name, p in gradients(module).items() if kind in name)


def three_times(module):
    for value in (1, 2, 4):
        put(module, float(value))
        module.backward_dw()


@pytest.mark.parametrize("make", KINDS)
def test_delayed_gradients_are_added(patched, make):
    module = make()
    three_times(module)
    assert are(module, 7)


@pytest.mark.parametrize("make", KINDS)
def test_stock_loses_some(make):
    with modules_on("cpu"):
        module = make()
        three_times(module)
    assert not are(module, 7, "weight") and not are(module, 7, "bias")


@pytest.mark.parametrize("make", KINDS)
def test_fused_weights_are_not_touched(patched, make):
    """Their products add to main_grad themselves. The biases are delayed all the same."""
    module = make()
    three_times(module)
    module.fuse_wgrad_accumulation = True
    put(module, 8.0)
    module.backward_dw()
    assert are(module, 7, "weight") and are(module, 15, "bias")


@pytest.mark.parametrize("nothing", [lambda *_: None, lambda *_: torch.empty(0)])
@pytest.mark.parametrize("make", KINDS)
def test_a_bias_that_autograd_has_served_gets_nothing_more(patched, make, nothing):
    """Under FP8 backward itself returns the gradients of biases, and no product has one."""
    module = make()
    for name, p in module.named_parameters(recurse=False):
        if "bias" in name:
            p.grad = torch.full_like(p, 5.0)
    for value in (1, 2):
        put(module, float(value), nothing)
        module.backward_dw()
    assert are(module, 3, "weight") and are(module, 5, "bias")


@pytest.mark.parametrize("make", KINDS)
def test_the_first_gradient_is_taken_as_it_is(patched, make):
    """No copy, and no operation, where nothing is there yet."""
    module = make()
    made = put(module, 3.0)
    module.backward_dw()
    found = gradients(module)
    assert all(found[name].data_ptr() == made[name].data_ptr() for name in made if name in found)


@pytest.mark.parametrize("make", KINDS)
def test_hooks_read_the_sum_and_may_take_it_away(patched, make):
    """As megatron-core's, which add the gradient to main_grad."""
    module = make()
    if not hasattr(module, "register_wgrad_accumulation_and_reduce_hooks"):
        pytest.skip("2.3 to 2.6 have no hooks")
    seen = []

    def hook():
        seen.append({name: gradient.clone() for name, gradient in gradients(module).items()})
        for p in module.parameters():
            p.grad = None

    put(module, 1.0)
    module.backward_dw()
    module.register_wgrad_accumulation_and_reduce_hooks(hook)
    for value in (2.0, 4.0):
        put(module, value)
        module.backward_dw()
    assert [float(next(iter(found.values())).max()) for found in seen] == [3, 4]
    assert all(p.grad is None for p in module.parameters())
    assert module.wgrad_accumulation_and_reduce_hooks == [hook]


@pytest.mark.parametrize("make", KINDS)
def test_an_error_in_a_product(patched, make):
    """What was there stays, and the next call is right."""
    module = make()
    put(module, 1.0)
    module.backward_dw()

    def fail(*_):
        raise ZeroDivisionError

    module.wgrad_store.put([None, None, None], fail)
    with pytest.raises(ZeroDivisionError):
        module.backward_dw()
    assert are(module, 1) and "pop" not in vars(module.wgrad_store)
    put(module, 2.0)
    module.backward_dw()
    assert are(module, 3)


def test_a_graph_that_is_captured_is_left_alone(patched):
    """Each replay would add once more to what its memory held in capture."""
    module = linear()
    put(module, 1.0)
    module.backward_dw()
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        put(module, 2.0)
        module.backward_dw()
    assert not are(module, 3, "weight") and are(module, 1, "bias")


def test_a_module_that_delays_nothing(patched):
    module = te.Linear(INPUTS, OUTPUTS, bias=True, **HOW)
    module.weight.grad = torch.ones_like(module.weight)
    module.backward_dw()
    assert bool((module.weight.grad == 1).all())
