"""An override that wraps, as trainers write it: with functools.wraps, and with the method in a default argument."""

import functools

import pytest
from fake_world import Model

import shim


@pytest.fixture
def layer(patched_world):
    found = patched_world.get("layers:Layer")
    patched_world.get("ops:double")
    shim.apply()
    return found


def found_with(instance):
    return shim.check(Model(instance))["count"]


def by_keyword(bound):
    @functools.wraps(bound)
    def forward(x, *args, _earlier=bound, **kwargs):
        return _earlier(x, *args, **kwargs)

    return forward


def by_position(bound):
    @functools.wraps(bound)
    def forward(x, _earlier=bound):
        return _earlier(x)

    return forward


def by_partial(bound):
    def forward(earlier, x):
        return earlier(x)

    return functools.partial(forward, bound)


@pytest.mark.parametrize("wrapped", [by_keyword, by_position, by_partial])
def test_the_method_is_found_in_a_default_argument(layer, wrapped):
    """Megatron-Bridge keeps it there, in a plain function on the instance."""
    instance = layer()
    instance.forward = wrapped(instance.forward)
    assert instance.forward(1)[0] == "count"
    found = found_with(instance)
    assert found.state == "applied", found.reason
    (told,) = found.others
    assert "and calls it" in told


@pytest.mark.parametrize("wrapped", [by_keyword, by_position])
def test_the_place_is_that_of_the_wrapper(layer, wrapped):
    """functools.wraps lends it upstream's names, and a reader looks for the trainer's line."""
    instance = layer()
    instance.forward = wrapped(instance.forward)
    (told,) = found_with(instance).others
    assert f"{__file__}:{instance.forward.__code__.co_firstlineno}" in told


def test_a_wrapper_with_upstreams_names_is_not_upstreams(layer):
    """Of a class: functools.wraps has copied __module__, too."""
    earlier = layer.forward

    class Bridge(layer):
        @functools.wraps(earlier)
        def forward(self, x):
            return earlier(self, x)

    assert Bridge.forward.__module__.startswith("megatron.core.")
    (told,) = found_with(Bridge()).others
    assert f"Bridge ({__file__}:{Bridge.forward.__code__.co_firstlineno}) overrides forward and calls it" in told


def test_upstreams_names_alone_call_nothing(layer):
    """functools.wraps leads to the method, also from a wrapper that never calls it."""

    class Another(layer):
        @functools.wraps(layer.forward)
        def forward(self, x):
            return "something else", x

    assert found_with(Another()).state == "shadowed"
    instance = layer()
    instance.forward = functools.wraps(instance.forward)(lambda x: ("something else", x))
    assert found_with(instance).state in ("shadowed", "unknown")
