"""A probe leaves nothing behind: random state, modes, and no message to another rank."""

import warnings

import pytest

from shim._engine.models import facts_of, run

torch = pytest.importorskip("torch")


def verdict(probe, module=None):
    return run(probe, module or torch.nn.Identity(), "module:Class.method", [])


@pytest.mark.parametrize(
    ("given", "found"),
    [(True, (True, "")), (False, (False, "")), (None, (None, "")), ("no GPU", (None, "no GPU")), (1, (None, ""))],
)
def test_what_a_probe_may_say(given, found):
    assert verdict(lambda *_: given) == found


def test_an_exception_means_that_nothing_is_known():
    def fails(module, method, models):
        raise TypeError("missing 1 argument\nand more")

    assert verdict(fails) == (None, "trying it raised TypeError: missing 1 argument")
    assert verdict(lambda *given: 1 / 0)[0] is None


def test_a_probe_draws_no_random_number_of_the_model():
    before = torch.get_rng_state()

    def draws(module, method, models):
        torch.rand(3)
        torch.manual_seed(5)
        raise ValueError

    verdict(draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probe_has_gradients_under_every_mode_and_the_mode_stays():
    def trains(module, method, models):
        weight = torch.ones(2, requires_grad=True)
        (weight * 2).sum().backward()
        return weight.grad is not None

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert verdict(trains) == (True, "")
            assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_warnings_of_an_override_are_not_told():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        verdict(lambda *given: warnings.warn("an override of others", stacklevel=1))
    assert not told


def test_a_message_to_other_ranks_is_refused(tmp_path):
    """Other ranks may have no such override, and would never answer."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        for send in (
            lambda *_: distributed.all_reduce(torch.ones(1)),
            lambda *_: distributed.all_gather([torch.ones(1)], torch.ones(1)),
            lambda *_: distributed.barrier(),
        ):
            known, why = verdict(send)
            assert known is None and "messages between ranks" in why
        distributed.all_reduce(torch.ones(1))
    finally:
        distributed.destroy_process_group()


def test_weights_on_the_meta_device_are_not_tried():
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    known, why = verdict(lambda *given: True, module)
    assert known is None and "meta device" in why


def test_a_verdict_depends_on_the_config_and_on_what_is_frozen():
    module = torch.nn.Linear(2, 2)
    module.config = type("Config", (), {})()
    seen = [facts_of(module)]
    module.config.recompute_granularity = "full"
    seen.append(facts_of(module))
    module.bias.requires_grad_(False)
    seen.append(facts_of(module))
    assert len(set(seen)) == 3 and facts_of(module) == facts_of(module) and facts_of(object())
